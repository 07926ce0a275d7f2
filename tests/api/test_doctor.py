"""The doctor checks the environment of a launch: variables alone, and against the other ranks."""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import typer

from penstock.api.doctor import Finding, Launched, check_launch, check_variables, compare_ranks
from penstock.cli.doctor import doctor

GOOD = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}


def found(num_devices: int = 0, **changes: str | None) -> Finding | None:
    """The first finding with a warning, with these changes of a good environment."""
    environment = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    return next((each for each in check_variables(environment, num_devices) if each.warning), None)


def test_a_complete_environment_has_no_warning() -> None:
    assert found() is None
    assert found(num_devices=4) is None
    assert [each.name for each in check_variables(GOOD, 0)] == ["launch", "address", "local rank"]


def test_without_a_launcher_there_is_no_warning() -> None:
    (only,) = check_variables({}, 8)
    assert (only.value, only.warning) == ("not started by a launcher", "")


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"MASTER_PORT": None, "WORLD_SIZE": None}, "MASTER_PORT, WORLD_SIZE not set"),
        ({"RANK": "4"}, "RANK must be a whole number from 0 to WORLD_SIZE - 1"),
        ({"RANK": "one"}, "RANK must be a whole number from 0 to WORLD_SIZE - 1"),
        ({"WORLD_SIZE": "0"}, "RANK must be a whole number from 0 to WORLD_SIZE - 1"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT must be a whole number from 1 to 65535"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be a whole number"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT must be a whole number"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR is unknown here"),
        ({"LOCAL_WORLD_SIZE": "2"}, "other hosts cannot reach a loopback address"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK must be a whole number from 0 to LOCAL_WORLD_SIZE - 1"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK must be a whole number from 0 to LOCAL_WORLD_SIZE - 1"),
    ],
)
def test_a_mistake_is_fatal_and_comes_with_a_hint(changes: dict[str, str | None], warning: str) -> None:
    finding = found(**changes)
    assert finding is not None
    assert finding.warning.startswith(warning)
    assert finding.hint
    assert finding.is_fatal


def test_a_rank_without_a_device_of_its_own_is_fatal() -> None:
    finding = found(num_devices=1, CUDA_VISIBLE_DEVICES="3")
    assert finding is not None
    assert finding.warning == "there is no device 1: this process sees 1 (CUDA_VISIBLE_DEVICES=3)"
    assert finding.is_fatal


def test_a_missing_local_rank_matters_only_with_devices() -> None:
    assert found(LOCAL_RANK=None) is None
    finding = found(num_devices=8, LOCAL_RANK=None)
    assert finding is not None
    assert "SLURM_LOCALID" in finding.hint


def test_srun_without_ranks_is_named() -> None:
    (only,) = check_variables({"SLURM_PROCID": "3"}, 0)
    assert only.warning == "srun started this process, and no rank is set"
    assert only.is_fatal


def ranks(*changes: dict[str, object]) -> list[Launched]:
    usual = Launched(0, "a", 1, 0, "cpu", "2.13.0", "0.1.0", "3.11.7")
    return [usual._replace(rank=rank, local_rank=rank)._replace(**change) for rank, change in enumerate(changes)]


def warnings(of: Sequence[Launched]) -> list[tuple[str, bool]]:
    return [(f"{each.name}: {each.value}: {each.warning}", each.is_fatal) for each in compare_ranks(of) if each.warning]


def test_equal_ranks_are_listed_without_a_warning() -> None:
    found = list(compare_ranks(ranks({}, {})))
    assert [each.name for each in found] == ["rank 0", "rank 1"]
    assert found[1].value == "a, local rank 1, cpu, torch 2.13.0, penstock 0.1.0, Python 3.11.7"
    assert warnings(ranks({}, {})) == []


def test_different_versions_are_found() -> None:
    assert warnings(ranks({}, {"torch": "2.12.0"}, {})) == [
        ("torch: 2.12.0 on rank 1, 2.13.0 on rank 0: the ranks have different versions", True)
    ]
    assert [is_fatal for _, is_fatal in warnings(ranks({}, {"penstock": "0.2.0"}))] == [True]
    assert [is_fatal for _, is_fatal in warnings(ranks({}, {"python": "3.12.1"}))] == [False]


def test_different_devices_are_found() -> None:
    (found,) = warnings(ranks({"device": "cuda:0 A100"}, {"device": "cpu"}))
    assert found == ("devices: cpu on rank 1, cuda on rank 0: the ranks have different kinds of devices", True)


def test_ranks_on_one_device_are_found() -> None:
    cuda = {"device": "cuda:0 A100", "local_rank": 0}
    (found,) = warnings(ranks(cuda, cuda))
    assert found == ("local ranks: 0 for 2 ranks on a: ranks 0, 1 would share one device", True)
    assert warnings(ranks(cuda, {**cuda, "host_id": 2})) == []


def test_ranks_on_the_cpu_need_no_local_rank() -> None:
    assert warnings(ranks({"local_rank": 0}, {"local_rank": 0})) == []


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.gloo
def test_the_ranks_of_a_launch_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    common = {**GOOD, "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    environments = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda environment: list(check_launch(environment, 60.0)), environments))
    for findings in results:
        values = {each.name: each.value for each in findings}
        assert values["store"] == "2 of 2 ranks connected"
        assert values["messages"] == "all-reduce over 2 ranks"
        assert "local rank 1, cpu, torch" in values["rank 1"]
        assert not any(each.warning for each in findings)


def missing_ranks(rank: int, seconds: float) -> Finding:
    """The only warning of a rank of three, if the others do not run."""
    environment = {**GOOD, "MASTER_PORT": free_port(), "WORLD_SIZE": "3", "RANK": str(rank)}
    (missing,) = [each for each in check_launch(environment, seconds) if each.warning]
    assert missing.is_fatal
    return missing


def test_ranks_that_do_not_answer_are_named() -> None:
    # Long enough for rank 0 to find itself in the store on a busy machine.
    assert missing_ranks(0, 4.0).warning == "ranks 1, 2 did not connect within 4 s"


def test_a_store_that_does_not_answer_is_named() -> None:
    missing = missing_ranks(1, 0.1)
    assert missing.value.startswith("no connection to 127.0.0.1:")
    assert missing.hint.startswith("rank 0 must run")


def test_a_fatal_finding_ends_with_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    broken = {name: value for name, value in GOOD.items() if name != "MASTER_PORT"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in broken.items():
            patch.setenv(name, value)
        with pytest.raises(typer.Exit) as ended:
            doctor()
    assert ended.value.exit_code == 5
    assert "error: launch: MASTER_PORT not set\ntry: torchrun" in capsys.readouterr().out
