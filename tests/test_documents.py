"""The documents match the code: commands and Python blocks run, tables, grids and pictures are compared.

A failing comparison shows the expected text of the document; copy it from there.
"""

import ast
import contextlib
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli import app
from penstock.ir import COMPUTE_KINDS, Overlap, number_text, percent_text
from penstock.schedules import SCHEDULES
from penstock.views import summary
from tests.selection import some

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS, PACKAGE = REPOSITORY / "docs", REPOSITORY / "penstock"
README, CONTRIBUTING = REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"
PAGES = sorted((*REPOSITORY.glob("*.md"), *DOCS.glob("*.md")))
VERBS = [command.callback.__name__.replace("_", "-") for command in app.registered_commands]
GROUPS = {group.typer_instance.info.name: group.typer_instance.registered_commands for group in app.registered_groups}
VERBS += [*GROUPS, *(f"{name} {command.callback.__name__}" for name, own in GROUPS.items() for command in own)]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))


@pytest.fixture
def _quick_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and examples plan as users do; here no search needs to be thorough."""
    from penstock.api.plan import plan  # loads torch

    monkeypatch.setitem(plan.__kwdefaults__, "budget_seconds", 0.1)
    # The commands pass a budget of their own.
    quick = {"budget_seconds": 0.1}
    monkeypatch.setattr(penstock, "plan", lambda *args, **options: plan(*args, **options | quick))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of that language in a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(path), re.MULTILINE | re.DOTALL)


def commands(path: Path) -> list[str]:
    """The lines of the console blocks of a page, without comments."""
    lines = "".join(blocks(path, "console")).splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), prog_name="penstock", env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.output


# ---------------------------------------------------------------------------------------------------------- commands


def test_every_command_in_the_documents_is_of_a_kind_that_is_checked() -> None:
    found = {command.split()[0] for page in PAGES for command in commands(page)}
    assert found == {"make", "penstock", ".venv/bin/python"}


@pytest.mark.parametrize("page", [README, CONTRIBUTING, DOCS / "index.md"], ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    makefile = text_of(REPOSITORY / "Makefile")
    targets = {word for command in commands(page) if command.startswith("make ") for word in command.split()[1:]}
    assert targets
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()


@pytest.mark.usefixtures("_quick_searches")
def test_the_commands_of_the_readme_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours = [shlex.split(command)[1:] for command in commands(README) if command.startswith("penstock ")]
    assert len(ours) > 4
    for arguments in ours:
        call(*arguments)


def smaller(code: str) -> str:
    """The model of the tutorial with other sizes, which no command names."""
    return code.replace("1024", "128").replace("256", "32")


@pytest.mark.usefixtures("_quick_searches")
def test_the_commands_of_the_tutorial_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = DOCS / "tutorial.md"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(smaller(blocks(page, "python")[0]), encoding="utf-8")
    ours = [
        shlex.split(command)[1:] for command in commands(page) if command != "penstock demo"
    ]  # tests/cli/test_demo.py
    assert {"capture", "plan", "explain", "check", "train", "report"} <= {verb for verb, *_ in ours}
    for arguments in ours:
        call(*arguments)


def test_paths_in_the_commands_of_contributing_exist() -> None:
    words = [word for command in commands(CONTRIBUTING) for word in command.split() if word.startswith("tests/")]
    assert words
    assert [word for word in words if not (REPOSITORY / word).exists()] == []


# ------------------------------------------------------------------------------------------------ Python and examples


def run_python(code: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The output of the code."""
    (directory / "block.py").write_text(code, encoding="utf-8")
    # Files that a page saves are not left in the project.
    with contextlib.chdir(directory):
        runpy.run_path(str(directory / "block.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.usefixtures("_quick_searches")
def test_the_python_of_the_readme_prints_its_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, code = blocks(README, "python")
    _, _, output = code.rpartition("  # ")
    assert run_python(code, tmp_path, capsys) == output


# The last block of the tutorial imports its first one.
@pytest.mark.usefixtures("_quick_searches")
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "tutorial.md"], ids=lambda page: page.name)
def test_every_python_block_runs(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code in blocks(page, "python"):
        run_python(code, tmp_path, capsys)


@pytest.mark.usefixtures("_quick_searches")
def test_the_tutorial_ends_with_the_readers_model_trained_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, train = blocks(DOCS / "tutorial.md", "python")
    (tmp_path / "mine.py").write_text(smaller(own), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    found = re.fullmatch(r"loss ([\d.]+) to ([\d.]+) on 2 ranks\n", run_python(train, tmp_path, capsys))
    assert found is not None
    assert float(found[2]) < float(found[1])


def test_every_call_in_the_tables_for_users_of_other_libraries_runs() -> None:
    page = DOCS / "coming_from.md"
    rows = [line.split(" | ") for line in text_of(page).splitlines() if line.startswith("| ")]
    called = {name for row in rows for name in re.findall(r"([\w.]+)\(", row[1])}
    python = "".join(blocks(page, "python"))
    assert len(called) > 30
    assert {name for name in called if f"{name}(" not in python} == set()


# Their models train in other tests, or the example runs in another one.
SLOW_EXAMPLES = {"gpt", "hf_llama", "hf_trainer", "resnet", "t5", "tensor_parallel", "custom_schedule"}


@pytest.mark.usefixtures("_quick_searches")
@pytest.mark.parametrize(
    "example", some([path for path in EXAMPLES if path.stem not in SLOW_EXAMPLES], EXAMPLES), ids=lambda path: path.stem
)
def test_every_example_runs_and_is_short(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out
    assert len(text_of(example).splitlines()) < 80


@pytest.mark.usefixtures("_quick_searches")
def test_the_refusal_shown_in_semantics_is_a_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(REPOSITORY / "examples" / "custom_schedule.py"), run_name="__main__")
    (refusal,) = blocks(DOCS / "semantics.md", "text")
    assert refusal in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- grids and pictures


def simulated(name: str, ranks: int, microbatches: int) -> "penstock.Trace":
    return penstock.simulate(penstock.schedule(name, ranks, microbatches))


def grid(trace: "penstock.Trace") -> str:
    """A line per rank and a cell per second; the backward of an overlapped pair is on a second line."""
    has_stages = trace.program.num_stages > trace.num_ranks
    rows: dict[tuple[int, int], dict[int, str]] = {}
    for span in trace.spans:
        if span.action.kind in COMPUTE_KINDS:
            is_pair = isinstance(span.action, Overlap)
            for line, each in enumerate((span.action.forward, span.action.backward) if is_pair else (span.action,)):
                text = str(each) if has_stages else str(each).removeprefix(str(each.stage))
                row = rows.setdefault((span.rank, line), {})
                row.update(dict.fromkeys(range(int(span.start), int(span.end)), text))
    width = max(len(text) for row in rows.values() for text in row.values())
    lines = []
    for rank in range(trace.num_ranks):
        for line in range(1 + max(line for _, line in rows)):
            row = rows.get((rank, line), {})
            cells = [row.get(second, " " if line else ".").ljust(width) for second in range(int(trace.makespan))]
            lines.append(f"{'      ' if line else f'rank {rank}'} | {' '.join(cells)}".rstrip())
    return "\n".join(lines)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_grid_in_a_docstring_is_the_simulated_one(name: str) -> None:
    docstring = ast.get_docstring(ast.parse(inspect.getsource(inspect.getmodule(SCHEDULES[name])))) or ""
    found = re.search(r"^For (\d+) ranks and (\d+) microbatches:\n\n((?:    .*\n?)+)$", docstring, re.MULTILINE)
    ranks, microbatches = (int(found[1]), int(found[2])) if found else (3, 4)
    expected = grid(simulated(name, ranks, microbatches))
    shown = textwrap.dedent(found[3]).strip() if found else f'add to the docstring: "For {ranks} ranks and ..."'
    assert shown == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_of_a_schedule_is_the_simulated_one(name: str, tmp_path: Path) -> None:
    call("simulate", name, "--svg", str(tmp_path / "new.svg"))
    drawn = DOCS / "pictures" / f"{name}.svg"
    is_same = drawn.exists() and text_of(drawn) == text_of(tmp_path / "new.svg")
    assert is_same, f"penstock simulate {name} --svg docs/pictures/{name}.svg"


def test_the_picture_of_memory_is_the_simulated_one(tmp_path: Path) -> None:
    call("simulate", "zb_h2", "--memory-svg", str(tmp_path / "new.svg"))
    is_same = text_of(DOCS / "pictures" / "memory.svg") == text_of(tmp_path / "new.svg")
    assert is_same, "penstock simulate zb_h2 --memory-svg docs/pictures/memory.svg"


# ------------------------------------------------------------------------------------------------------------ tables


def rows(path: Path, first_header: str) -> list[dict[str, str]]:
    """The rows of the Markdown table whose first header is given."""
    lines = [line for line in text_of(path).splitlines() if line.startswith("|")]
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first_header} |"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    names = cells[0]
    return [dict(zip(names, row, strict=True)) for row in cells[2:] if len(row) == len(names)]


def test_the_page_of_schedules_lists_every_schedule_with_its_simulated_figures() -> None:
    stated = {row["name"].strip("`"): (row["bubble"], row["in flight"]) for row in rows(DOCS / "schedules.md", "name")}
    found = {name: summary(simulated(name, 4, 8)) for name in SCHEDULES}
    assert stated == {name: (percent_text(each.bubble), number_text(each.in_flight, 3)) for name, each in found.items()}


@pytest.mark.parametrize(("name", "share"), [("v_half", 1 / 2), ("v_min", 2 / 3)])
def test_the_idle_time_that_is_given_as_about_a_share_of_1f1b_is_about_that(name: str, share: float) -> None:
    work, stages_per_rank = 3 * 64, 2
    idle = {each: simulated(each, 16, 64).makespan for each in ("1f1b", name)}
    ratio = (idle[name] / stages_per_rank - work) / (idle["1f1b"] - work)
    assert ratio == pytest.approx(share, abs=0.05)


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len(text_of(README).splitlines()) <= 150


@pytest.mark.parametrize("page", [README, CONTRIBUTING, *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_lines_of_prose_have_at_most_120_characters(page: Path) -> None:
    prose = re.sub(r"^( *)```.*?^\1```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    # Tables, output and options of directives cannot be wrapped.
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "    ", "   :"))]
    assert [line for line in lines if len(line) > 120] == []


def test_the_readme_counts_the_models_of_the_survey() -> None:
    total = next(row for row in rows(DOCS / "architectures.md", "models") if row["models"] == "all")
    tried, exact, warned, refused = (int(total[name]) for name in ("tried", "exact", "warned", "refused"))
    failed = tried - exact - warned - refused
    counts = (
        f"of [{tried} tried](docs/architectures.md) {exact} match the unsplit model, {warned} warn that samples "
        f"interact, {refused} are refused" + (f", {failed} do not match" if failed else "")
    )
    assert counts in text_of(README)


def test_the_page_of_schedules_states_the_stages_per_rank() -> None:
    stated = {row["name"].strip("`"): row["v"] for row in rows(DOCS / "schedules.md", "name")}
    assert stated == {
        name: "/".join(map(str, member.allowed_stages_per_rank)) or "any" for name, member in SCHEDULES.items()
    }


def test_the_readme_states_the_number_of_schedules() -> None:
    assert f"[{len(SCHEDULES)} schedules](docs/schedules.md)" in text_of(README)


def test_the_page_of_schedules_has_a_section_for_each() -> None:
    assert re.findall(r"^## (\S+)$", text_of(DOCS / "schedules.md"), re.MULTILINE) == list(SCHEDULES)


def test_the_architecture_names_every_package() -> None:
    named = {row["package"].strip("`") for row in rows(DOCS / "architecture.md", "package")}
    packages = {path.parent.name for path in (REPOSITORY / "penstock").glob("*/__init__.py")}
    assert packages - named == set()


# ------------------------------------------------------------------------------------------------- help, links, words


def plain(text: str) -> str:
    """Words only: versions of typer differ in brackets, in the names of types and in where lines break."""
    return " ".join(re.sub(r"<\w+>|[\[\]{}]", " ", text).split())


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_the_help_in_the_documents_is_the_real_one(verb: str) -> None:
    real = call(*verb.split(), "--help")
    shown = [plain(block) for block in blocks(DOCS / "cli.md", "text")]
    assert plain(real) in shown, f"docs/cli.md should hold\n\n{real}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_targets_of_links_and_pictures_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    included = re.findall(r"^```\{include\} (\S+)", text_of(page), re.MULTILINE)
    local = [target.split("#")[0] for target in (*links, *included) if not re.match(r"[a-z]+://|#", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub and Sphinx make them from its headings."""
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_anchors_of_links_exist(page: Path) -> None:
    links = re.findall(r"\]\(([\w./]*\.md|)#([^)\s]+)\)", text_of(page))
    assert [
        f"{name}#{anchor}" for name, anchor in links if anchor not in headings(page.parent / name if name else page)
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    written = re.findall(r"`((?:penstock|tests|docs|examples)/[\w/]+\.\w+)`", text_of(page))
    missing = {name for name in written if not (REPOSITORY / name).exists()}
    assert missing <= {"penstock/schedules/flush.py", "penstock/cli/verb.py"}  # which the recipes tell to write


def test_files_that_the_architecture_names_relative_to_the_package_exist() -> None:
    written = set(re.findall(r"`([a-z_]+/[\w/]*(?:\.\w+)?)`", text_of(DOCS / "architecture.md")))
    assert len(written) > 40
    missing = {name for name in written if not any((root / name).exists() for root in (REPOSITORY, PACKAGE))}
    assert missing == set()


# ---------------------------------------------------------------------------------------------------------- recipes


def test_the_recipe_for_a_schedule_works_as_written(tmp_path: Path) -> None:
    """Follow it in a copy, then run on the new schedule whatever tests run over the table."""
    # With compiled modules, but without files that another worker is still writing and renames.
    skipped = shutil.ignore_patterns("_build", "*.pyc.*")
    for part in ("penstock", "tests", "docs"):
        shutil.copytree(REPOSITORY / part, tmp_path / part, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile"):
        shutil.copy(REPOSITORY / name, tmp_path)
    (code,), (change,) = blocks(CONTRIBUTING, "python"), blocks(CONTRIBUTING, "diff")
    new_import, new_line = (line.removeprefix("+") for line in change.splitlines())
    (tmp_path / "penstock" / "schedules" / "flush.py").write_text(code, encoding="utf-8")
    table = tmp_path / "penstock" / "schedules" / "__init__.py"
    after = next(line for line in text_of(table).splitlines() if line.startswith("from penstock.schedules.gpipe"))
    edited = text_of(table).replace(after, f"{new_import}\n{after}").replace("\n}", f"\n{new_line}\n}}", 1)
    table.write_text(edited, encoding="utf-8")

    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    picture = ["simulate", "flush", "--svg", "docs/pictures/flush.svg"]
    drawn = subprocess.run([sys.executable, "-c", "from penstock.cli import main; main()", *picture], **options)
    assert drawn.returncode == 0, drawn.stderr
    linted = subprocess.run([sys.executable, "-m", "ruff", "check", table.parent / "flush.py", table], **options)
    assert linted.returncode == 0, linted.stdout
    checks = ["tests/test_documents.py", "tests/schedules", "tests/cli/test_check.py", "tests/cli/test_simulate.py"]
    lists = "test_names or (test_simulate and not written)"  # they know the table as a whole
    # It loads torch and knows only schedules that torch has.
    ignored = "--ignore=tests/schedules/test_torch_parity.py"
    command = [sys.executable, "-m", "pytest", "-v", *checks, ignored, "-k", f"flush or {lists}"]
    tested = subprocess.run(command, **options)
    assert tested.returncode == 0, tested.stdout
    assert len(re.findall(r"flush.* PASSED", tested.stdout)) >= 3
