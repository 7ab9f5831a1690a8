"""The pages of docs/ are true: links resolve, code blocks run, commands parse, samples read, the key table is current.

Fenced blocks say what becomes of them: ``python run`` is executed (with ``>>>``: as a doctest, and the doctests of a
page share their names), ``python ranks`` is executed on two gloo ranks, all blocks of a page as one program; ``toml``
must load as a configuration, ``toml rules`` as partition rules; ``text sample=NAME`` is a data file that the ``toml``
block naming it reads; ``text printed`` are lines that the ``bash`` block before it prints; ``bash`` lines must parse.
Blocks marked ``tutorial`` are run one after another: ``toml tutorial=NAME`` becomes a file, ``python`` shares its
names, ``bash`` lines are run.
"""

from __future__ import annotations

import doctest
import importlib.util
import math
import os
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from benchmarks.pages import SENTENCES, TABLES, pages, pattern, with_current_numbers, with_current_tables
from dmt.partitioner import PartitionRules
from dmt.sptt.mesh import TowerMesh
from dmt.training.__main__ import main as train
from dmt.training.commands import main
from dmt.training.commands.doctor import TESTED
from dmt.training.config import load_config
from dmt.training.data.clicks import ClickData
from dmt.training.job import open_job
from dmt.training.train import train_job
from tests.ranks import run_program, run_ranks

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [page for page in [ROOT / "README.md", *DOCS] if page.exists()]
FENCE = re.compile(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    page: Path
    language: str
    mark: str
    text: str


BLOCKS = [Block(page, *match.groups()) for page in DOCS for match in FENCE.finditer(page.read_text())]
COMMANDS = [
    (block.page.name, line)
    for block in BLOCKS
    if block.language == "bash" and block.mark != "tutorial"
    for line in block.text.replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]


def blocks(language: str, mark: str = "") -> list[Block]:
    return [block for block in BLOCKS if block.language == language and block.mark.startswith(mark)]


def pages_with(language: str, mark: str) -> list[Path]:
    return sorted({block.page for block in blocks(language, mark)})


def anchors(page: Path) -> set[str]:
    """The anchors that a Markdown viewer gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}; {file.name} has no such heading"


def loaded(path: Path) -> ModuleType:
    """Loads a program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_has_every_page_and_documents_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make docs` checks this too, but needs further packages."""
    site = loaded(ROOT / "docs" / "build_site.py")
    monkeypatch.setattr(site, "OUT", tmp_path)
    site.main()
    named = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]))
    assert named == {page.name for page in tmp_path.glob("*.md")} >= {page.name for page in DOCS}
    documented = []
    for name in re.findall(r"^::: (\S+)$", (tmp_path / "api.md").read_text(), re.M):
        module, _, member = name.rpartition(".")
        documented.append(
            getattr(importlib.import_module(module if module.startswith("dmt") else f"dmt.{module}"), member)
        )
        assert documented[-1].__doc__, f"{name} has no docstring"
    for package in ("dmt", "dmt.models", "dmt.partitioner", "dmt.testing"):
        module = importlib.import_module(package)
        absent = [name for name in module.__all__ if getattr(module, name) not in documented]
        assert not absent, f"docs/site/api.md lacks {absent} of {package}"


KNOWN = {"python": ("run", "ranks", "tutorial"), "toml": ("", "rules", "tutorial="), "bash": ("", "tutorial")}
KNOWN["text"] = ("", "sample=", "printed")


def test_every_block_says_what_becomes_of_it() -> None:
    assert len(BLOCKS) > 20, "the pages have lost their code blocks, or the pattern no longer finds them"
    for block in BLOCKS:
        start = block.mark.partition("=")[0] + ("=" if "=" in block.mark else "")
        assert start in KNOWN.get(block.language, ()), f"{block.page.name}: ```{block.language} {block.mark}"


@pytest.mark.parametrize("page", pages_with("python", "run"), ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks("python", "run")):
        if block.page != page:
            continue
        name = f"{page.name}, block {number}"
        if ">>>" not in block.text:
            exec(compile(block.text, name, "exec"), {"__name__": "docs"})
            continue
        test = doctest.DocTestParser().get_doctest(block.text, names, name, str(page), 0)
        report: list[str] = []
        result = doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False)
        names = test.globs
        assert result.attempted, f"{name} has no example"
        assert not result.failed, "".join(report)


def blocks_on_rank(rank: int, code: str, folder: str) -> int:
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(code, "docs", "exec"), names)
    return len(names)


@pytest.mark.ranks
@pytest.mark.parametrize("page", pages_with("python", "ranks"), ids=lambda page: page.name)
def test_python_blocks_run_on_ranks(page: Path, tmp_path: Path) -> None:
    code = "\n".join(block.text for block in blocks("python", "ranks") if block.page == page)
    assert min(run_ranks(blocks_on_rank, 2, code, str(tmp_path))) > 2, "the blocks define nothing"


def train_on_rank(rank: int, folder: str, arguments: list[str]) -> None:
    os.chdir(folder)
    job = open_job(load_config(arguments[0], arguments[1:]))
    train_job(job, TowerMesh(job.topology))


def run_command(line: str, folder: Path) -> None:
    """Runs a command of the tutorial: ``torchrun`` on the ranks of the tests, ``dmt`` in this process."""
    program, *arguments = shlex.split(line)
    if program == "torchrun":
        option, ranks, *program_of_ranks = arguments
        assert [option, *program_of_ranks[:2]] == ["--nproc-per-node", "-m", "dmt.training"], line
        run_ranks(train_on_rank, int(ranks), str(folder), program_of_ranks[2:])
    else:
        assert program == "dmt", line
        ran = CliRunner().invoke(main, arguments)
        assert ran.exit_code == 0, f"{line}: {ran.output}"


@pytest.mark.ranks
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "tutorial"}
    steps = [block for block in BLOCKS if block.mark.startswith("tutorial")]
    assert {block.page.name for block in steps} == {"tutorial.md"}
    for number, block in enumerate(steps):
        if block.language == "toml":
            Path(block.mark.partition("=")[2]).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, f"tutorial.md, block {number}", "exec"), names)
        else:
            for line in block.text.splitlines():
                run_command(line, tmp_path)


def words_of(line: str) -> str:
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", line).split())


@pytest.mark.parametrize("block", blocks("text", "printed"), ids=lambda block: block.page.name)
def test_what_a_page_says_is_printed_is_printed(block: Block) -> None:
    command = FENCE.findall(block.page.read_text().partition(block.text)[0])[-1][2]
    ran = CliRunner().invoke(main, shlex.split(command)[1:], env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    printed = {words_of(line) for line in ran.output.splitlines()}
    assert {words_of(line) for line in block.text.splitlines()} <= printed, f"prints now:\n{ran.output}"


@pytest.mark.parametrize(
    "block", [*blocks("toml", "rules"), *(b for b in blocks("toml") if not b.mark)], ids=lambda block: block.page.name
)
def test_toml_blocks_load(block: Block, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(block.text)
    if block.mark == "rules":
        PartitionRules.load(tmp_path / "a.toml")
    else:
        load_config(tmp_path / "a.toml")


@pytest.mark.parametrize("block", blocks("text", "sample="), ids=lambda block: block.mark)
def test_data_samples_are_read(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = block.mark.removeprefix("sample=")
    config = next(
        other.text for other in blocks("toml") if other.page == block.page and f'train_path = "{name}"' in other.text
    )
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(block.text)
    Path("run.toml").write_text(config)
    # A tenth of three rows is none; the page shows the format, not the amount.
    overrides = [] if "split_column" in config else ["data.eval_fraction=0.4"]
    data = ClickData(load_config("run.toml", overrides).data, cache=tmp_path / "prepared")
    header = not name.endswith(".tsv")
    assert (data.num_rows("train") or 0) + (data.num_rows("eval") or 0) == len(block.text.splitlines()) - header
    for split in ("train", "eval"):
        batch = next(data.batches(split, rank=0, world_size=1, batch_size=1))
        assert batch.sparse_features.keys() == list(data.columns.feature_names)


def check_dmt(arguments: list[str]) -> None:
    name, *rest = arguments
    assert name in main.commands, f"dmt has no command {name!r}"
    context = main.commands[name].make_context(name, rest)  # raises what click raises
    if name == "demo":
        overrides = context.params["overrides"]
        if any(override.startswith("data.") for override in overrides):
            overrides = ["data.kind=columns", f"data.train_path={context.params['data']}", *overrides]
        load_config("demo", overrides)


def check_torchrun(arguments: list[str]) -> None:
    if "--no-python" in arguments:
        program, *rest = arguments[arguments.index("--no-python") + 1 :]
        assert program == "dmt", program
        check_dmt(rest)
    elif "-m" not in arguments:
        script = next(argument for argument in arguments if argument.endswith(".py"))
        assert (ROOT / script).exists(), script
    else:
        module, *rest = arguments[arguments.index("-m") + 1 :]
        assert module == "dmt.training", module
        params = train.make_context(module, rest).params
        is_file = params["config"].endswith(".toml")  # a file that the page tells the reader to write
        config = load_config("demo" if is_file else params["config"], params["overrides"])
        sizes = [int(arguments[arguments.index(f) + 1]) for f in ("--nnodes", "--nproc-per-node") if f in arguments]
        assert is_file or config.topology.build().world_size == math.prod(sizes), "the config has other ranks"


def check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for argument in arguments:
        variable, equals, _ = argument.partition("=")
        found = f"$({variable})" in makefile or f"{variable} ?=" in makefile if equals else f"\n{variable}:" in makefile
        assert found, f"the Makefile knows no {argument!r}"


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda value: value)
def test_commands_parse(page: str, line: str) -> None:
    program, *arguments = shlex.split(line)
    checks = {"dmt": check_dmt, "torchrun": check_torchrun, "make": check_make}
    if program in checks:
        checks[program](arguments)
    else:
        assert program in ("pip", "python3.11", "."), f"{page}: nothing checks {line!r}"


def test_pinned_versions_are_those_of_the_doctor_and_the_locks() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    named = set(re.findall(r"(torch|torchrec|fbgemm-gpu|fbgemm-gpu-cpu)==([\d.]+)", page))
    assert {name for name, _ in named} == {"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"}
    known = set(TESTED["2.13"].items())
    assert {("fbgemm" if name.startswith("fbgemm") else name, version) for name, version in named} == known
    for stack, lock in (("2.13", "cpu.lock"), ("2.14", "cpu-2.14.lock")):
        pinned = (ROOT / "requirements" / lock).read_text().lower().replace("_", "-")
        for name, version in TESTED[stack].items():
            package = "fbgemm-gpu-cpu" if name == "fbgemm" else name
            assert f"\n{package}=={version}\n" in pinned


def test_the_references_are_current() -> None:
    builder = loaded(ROOT / "docs" / "build_reference.py")
    for page, reference in builder.PAGES.items():
        text = page.read_text()
        assert builder.current_page(text, reference()) == text, "run: python docs/build_reference.py"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_pages_hold_what_their_records_hold(page: Path) -> None:
    text = page.read_text()
    current = with_current_numbers(page.name, with_current_tables(text))
    assert current.splitlines() == text.splitlines(), "run: python -m benchmarks.pages"


def cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_table_of_measurements_is_compared_with_its_record(page: Path) -> None:
    """Those in sections that link to a record, and those with a cell that is a number with decimals."""
    for section in re.split(r"^#+ ", FENCE.sub("", page.read_text()), flags=re.MULTILINE):
        for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
            header, _, *rows = map(cells, table.splitlines())
            is_measured = any(re.fullmatch(r"[+-]?[\d,]+\.\d+", cell) for row in rows for cell in row)
            if is_measured or "benchmarks/results/" in section:
                assert header in TABLES, f"{page.name}: make this table in benchmarks/pages.py: {header}"


README = (ROOT / "README.md").read_text()


def sides() -> tuple[str, str]:
    """The script before and after the change."""
    found = re.search(r"```diff\n(.*?)```", README, re.S)
    assert found, "README.md has no diff"
    lines = found[1].splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] in ("", " ", mark)) + "\n" for mark in "-+")  # type: ignore[return-value]


@pytest.mark.ranks
def test_both_sides_of_the_diff_run_and_print_the_same(tmp_path: Path) -> None:
    printed = []
    for name, text in zip(("before.py", "after.py"), sides(), strict=True):
        (tmp_path / name).write_text(text)
        run = run_program([name], 4, tmp_path)
        assert run.returncode == 0, run.stderr[-2000:]
        printed.append(run.stdout)
    assert printed == ["['user', 'city', 'item', 'shop'] (2, 64)\n"] * 2


@pytest.mark.parametrize("header", TABLES, ids=lambda header: header[0])
def test_a_changed_cell_is_noticed(header: tuple[str, ...]) -> None:
    """So is a table that is on no page: it is taken out of benchmarks/pages.py."""
    lines, first = next(
        (text, number + 2)
        for text in (page.read_text().splitlines() for page in pages())
        for number, line in enumerate(text)
        if cells(line) == header
    )
    row = lines[first]
    digit = re.search(r"\d(?=[^|\d]*\|)", row)
    assert digit is not None
    lines[first] = row[: digit.start()] + str((int(digit[0]) + 1) % 10) + row[digit.end() :]
    assert with_current_tables("\n".join(lines)).splitlines()[first] == row


@pytest.mark.parametrize("name", SENTENCES)
def test_a_changed_number_of_a_sentence_is_noticed(name: str) -> None:
    text = next(page for page in pages() if page.name == name).read_text()
    for sentence in SENTENCES[name]():
        found = pattern(sentence).search(text)
        assert found is not None, sentence
        for group in range(1, pattern(sentence).groups + 1):
            changed = f"{text[: found.start(group)]}7{found[group]}{text[found.end(group) :]}"
            assert with_current_numbers(name, changed) == text


def test_the_map_names_every_page() -> None:
    linked = set(LINK.findall((ROOT / "docs" / "index.md").read_text()))
    assert {page.name for page in DOCS if page.name != "index.md"} <= linked
    assert {f"../examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} <= linked
