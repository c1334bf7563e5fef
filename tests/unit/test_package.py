"""The package's surface: few names, imported when used; a command line that answers without the heavy imports."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fairhead

HEAVY = ["torch", "transformers", "numpy", "pandas", "scipy", "jinja2"]


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_at_most_sixteen_public_names():
    assert 1 <= len(fairhead.__all__) <= 16
    assert set(fairhead.__all__) == set(fairhead._PUBLIC)
    assert set(dir(fairhead)) == {*fairhead.__all__, "__version__"}


def test_public_names_are_where_they_are_said_to_be():
    for name, module in fairhead._PUBLIC.items():
        if module in ("fairhead.audit", "fairhead.errors", "fairhead.records"):
            assert getattr(fairhead, name) is not None
        else:
            # Needs torch, which this tier has not; but the module must be there.
            assert importlib.util.find_spec(module) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fairhead.nothing


def test_what_needs_torch_says_how_to_get_it():
    """This tier has no torch, as an installation for auditing has none."""
    with pytest.raises(ModuleNotFoundError, match=r'fairhead.tap needs torch.*pip install "fairhead\[torch\]"'):
        _ = fairhead.tap


def test_import_is_lazy():
    code = f"import sys, fairhead; print([m for m in {HEAVY} if m in sys.modules])"
    assert python(code) == "[]\n"


def test_a_verb_has_what_is_in_its_package_whatever_was_imported_before():
    code = "import fairhead, inspect; print(fairhead.audit.drift.__name__, inspect.signature(fairhead.audit))"
    assert python(code).startswith("drift (data: ")


def test_help_on_a_verb_is_that_of_its_function():
    """`fairhead.audit?` in a notebook showed what its package is for."""
    assert fairhead.audit.__doc__ == fairhead.audit.audit.__doc__
    assert "Args:" in fairhead.locate.__doc__


def test_audit_needs_no_torch():
    code = "import sys, fairhead; fairhead.audit; fairhead.Records; fairhead.compare; print('torch' in sys.modules)"
    assert python(code) == "False\n"


def test_groups_of_a_file_need_no_pictures():
    code = "import sys, fairhead.cli.audit; from fairhead.records.layout import GroupFile; print('PIL' in sys.modules)"
    assert python(code) == "False\n"


@pytest.mark.parametrize("arguments", [["--help"], ["audit", "--help"], ["--version"], []])
def test_help_imports_nothing_heavy(arguments):
    code = f"""
import sys
from fairhead.cli import main
try:
    main({arguments!r})
except SystemExit as stop:
    assert not stop.code
print([m for m in {HEAVY} if m in sys.modules])
"""
    assert python(code).splitlines()[-1] == "[]"


def test_module_and_command_are_the_same(tmp_path):
    def answer(*command):
        done = subprocess.run([*command, "audit", "--help"], capture_output=True, text=True, env={"COLUMNS": "100"})
        return done.returncode, done.stdout, done.stderr

    module = answer(sys.executable, "-m", "fairhead")
    assert module == answer(str(Path(sys.executable).with_name("fairhead")))
    assert module[0] == 0


def test_help_teaches():
    done = subprocess.run([sys.executable, "-m", "fairhead", "audit", "--help"], capture_output=True, text=True)
    for word in ("Examples", "fairhead audit preds.csv", "--compare-pred", "minimum detectable", "Exit code 2"):
        assert word in " ".join(done.stdout.split())


def test_version():
    done = subprocess.run([sys.executable, "-m", "fairhead", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"fairhead {fairhead.__version__}\n"


def test_commands_of_the_guides_name_models_that_a_reader_has():
    """A name of the hub with its owner, a size, or a folder: one of a run, or one that a command of the page writes."""
    root = Path(fairhead.__file__).parents[2]
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        written = set(re.findall(r"--(?:out|save) (\S+)", text)) | {"classifier", "7b", "8b"}
        asked = re.findall(r"^(?:\$ fairhead|    ).*?--(?:model|encoder) (\S+)", text, re.M)
        asked += re.findall(r"""fairhead\.(?:mitigate|locate|score)\("([^"]+)""", text)
        for name in asked:
            known = re.fullmatch(r"hub:[\w.-]+/[\w.-]+|vit-\d+x\d+|features:\S+|run/\S+", name)
            assert known or name in written, f"{page.name}: {name}"


def files_with(pattern):
    """The files of the package that have it, by their paths within the package."""
    source = Path(fairhead.__file__).parent
    found = [file for file in source.rglob("*.py") if re.search(pattern, file.read_text(encoding="utf-8"))]
    return {file.relative_to(source).as_posix() for file in found}


def test_models_are_loaded_in_one_place():
    """Elsewhere the method that a model carries would be left out, and missing weights be random numbers."""
    assert files_with(r"\.from_pretrained\(") == {"models/load.py", "models/places.py"}


def test_attention_is_called_in_one_room():
    names = r"Attention(Mask)?Interface|ALL_ATTENTION_FUNCTIONS|_attn_implementation|scaled_dot_product_attention"
    assert {file.partition("/")[0] for file in files_with(names)} == {"heads"}


def test_ends_of_intervals_are_found_in_two_rooms():
    """Where the live page shows the range of its control sets, it calls it so."""
    found = files_with(r"np\.(nan)?(quantile|percentile)\(|\bquantiles\(|\.ppf\(")
    assert {file.partition("/")[0] for file in found - {"locate/live.py"}} == {"stats", "audit"}


def test_files_are_short_and_names_tell_them_apart():
    files = list(Path(fairhead.__file__).parent.rglob("*.py"))
    names = [file.name for file in files if file.name != "__init__.py"]
    assert [name for name in names if names.count(name) > 1] == []
    assert [str(file) for file in files if len(file.read_text(encoding="utf-8").splitlines()) > 400] == []


def test_the_worked_examples_would_pass_the_checks(tmp_path):
    """Whoever adds what the page shows, as it shows it, has typed and documented functions, in the house's format."""
    page = Path(__file__).parents[2] / "CONTRIBUTING.md"
    examples = dict(re.findall(r"<!-- example: (\w+)\.py -->\n```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
    assert {*examples} == {"reviews", "jobs", "group_sizes", "focal", "anti_only"}
    for name, code in examples.items():
        (tmp_path / f"{name}.py").write_text(code)
        for part in ast.walk(ast.parse(code)):
            if isinstance(part, ast.FunctionDef):
                given = [*part.args.args, *part.args.kwonlyargs]
                assert part.returns is not None, f"{name}: {part.name}"
                assert all(one.annotation or one.arg == "self" for one in given), f"{name}: {part.name}"
    ruff, rules = [sys.executable, "-m", "ruff"], ["--config", str(page.parent / "pyproject.toml"), str(tmp_path)]
    for check in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        done = subprocess.run([*ruff, *check, *rules], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
