"""The pages about GPUs and clusters: scripts run with faked commands and variables, YAML is parsed, Python is run."""

import ast
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

import penstock
from penstock.api.doctor import check_variables

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("gpus.md", "two_nodes.md", "slurm.md", "kubernetes.md", "ray.md")


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in found]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_it_was_not_run_on(page: str) -> None:
    assert "not yet run" in " ".join((DOCS / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", PAGES)
def test_python_is_valid(page: str) -> None:
    for code in blocks(page, "py"):
        ast.parse(code)


# ------------------------------------------------------------------------------------------------------------- Python


def run_script(code: str, port: int) -> str:
    """Run a script as a rank that torchrun started; returns its output."""
    dist.barrier()  # the other rank may still be connecting to this one
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    path = Path(f"script-{os.environ['RANK']}.py")
    path.write_text(code, encoding="utf-8")
    output = StringIO()
    with redirect_stdout(output):
        runpy.run_path(str(path), run_name="__main__")
    return output.getvalue()


@pytest.mark.gloo
def test_the_script_for_gpus_trains_on_cpus_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = blocks("gpus.md", "py")[0]
    shorter = {"microbatches=8,": "microbatches=2, budget_seconds=0.1,"}
    for text, other in {**shorter, "range(16)": "range(4)", "range(10)": "range(4)"}.items():
        assert text in script
        script = script.replace(text, other)
    first, second = penstock.launch(run_script, 2, script, port)
    losses = [float(text) for text in re.findall(r"^step \d+: loss ([\d.]+)$", first, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert second == ""


def test_the_script_for_ray_trains_on_cpus(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch", reason="ray is not installed")
    start = "import ray\n\nray.init(num_cpus=4, include_dashboard=False)\n"
    (tmp_path / "script.py").write_text(start + blocks("ray.md", "py")[0], encoding="utf-8")
    # Workers of lower priority than other tests would take minutes to start.
    settings = {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **settings}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert re.search(r"loss 1\.\d+ on 2 workers", done.stdout), done.stderr[-2000:]


# -------------------------------------------------------------------------------------------------------------- SLURM

TORCHRUN = """\
#!/bin/bash
echo "torchrun $*" >> log
trap 'echo saved >> log; exit 1' TERM
if [ "$BEHAVIOUR" = waits ]; then
    touch started
    for _ in $(seq 600); do sleep 0.05; done
fi
[ "$BEHAVIOUR" != fails ]
"""
# Like srun, it passes SIGTERM on to its task and waits for it.
SRUN = """\
#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
"$@" &
task=$!
trap 'kill -TERM $task; wait $task; exit 1' TERM
wait $task
"""
SCONTROL = """\
#!/bin/bash
if [ "$1" = requeue ]; then echo "requeue $2" >> log; else printf 'node1\\nnode2\\n'; fi
"""
VARIABLES = {
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_ID": "4711",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "4",
}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A directory with the commands of a cluster, which write what they do into `log`."""
    for name, text in (("torchrun", TORCHRUN), ("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def start(cluster: Path, script: str, **variables: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, **VARIABLES, **variables, "PATH": f"{cluster}:{os.environ['PATH']}"}
    bash = shutil.which("bash") or "/bin/bash"
    return subprocess.Popen(
        [bash, "-c", script], cwd=cluster, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize(("behaviour", "code"), [("ends", 0), ("fails", 1)])
def test_a_job_that_ends_is_not_queued_again(cluster: Path, behaviour: str, code: int) -> None:
    process = start(cluster, blocks("slurm.md", "bash")[0], BEHAVIOUR=behaviour)
    process.communicate(timeout=60)
    (line,) = (cluster / "log").read_text().splitlines()
    assert process.returncode == code
    assert "--nnodes 2 --nproc-per-node 4" in line
    assert "--rdzv-endpoint node1:29500 --rdzv-id 4711" in line
    assert "--resume auto" in line


def test_a_job_that_is_stopped_saves_and_is_queued_again(cluster: Path) -> None:
    process = start(cluster, blocks("slurm.md", "bash")[0], BEHAVIOUR="waits")
    deadline = time.monotonic() + 60
    while not (cluster / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert (cluster / "log").read_text().splitlines()[1:] == ["saved", "requeue 4711"]


def test_srun_alone_sets_the_variables_of_torchrun(cluster: Path) -> None:
    (cluster / "python").write_text("#!/bin/bash\nenv\n", encoding="utf-8")
    (cluster / "python").chmod(0o755)
    ranks = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}
    output, _ = start(cluster, blocks("slurm.md", "bash")[1], **ranks).communicate(timeout=60)
    environment = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    expected = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "29500"}
    assert {name: environment[name] for name in expected} == expected
    assert environment["MASTER_ADDR"] == "node1"
    assert not any(each.warning for each in check_variables({**environment, "MASTER_ADDR": "192.0.2.1"}, 4))


# --------------------------------------------------------------------------------------------------------- Kubernetes


def test_the_job_for_kubernetes_is_complete() -> None:
    job = yaml.safe_load(blocks("kubernetes.md", "yaml")[0])
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}
    for each in replicas.values():
        pod = each["template"]["spec"]
        (container,) = pod["containers"]
        (command,) = container["args"]
        assert container["name"] == "pytorch"  # the operator sets the variables of a container of this name
        assert f"--nnodes {sum(one['replicas'] for one in replicas.values())}" in command
        assert f"--nproc-per-node {container['resources']['limits']['nvidia.com/gpu']}" in command
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
        assert pod["terminationGracePeriodSeconds"] > 60
        assert all(isinstance(one["value"], str) for one in container["env"])


def test_the_options_of_the_commands_exist() -> None:
    from typer.testing import CliRunner

    from penstock.cli import app

    known = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    pages = [*blocks("slurm.md", "bash"), *blocks("kubernetes.md", "yaml")]
    commands = [text.partition("-m penstock train")[2].partition("&")[0].partition("env:")[0] for text in pages]
    used = {option for command in commands for option in re.findall(r"--[\w-]+", command)}
    assert used == {"--data", "--loss", "--device", "--checkpoint", "--every", "--resume", "--out"}
    assert {option for option in used if option not in known} == set()
