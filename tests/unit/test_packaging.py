"""What a user installs: the wheel and the sdist hold our one package, and nobody else's import name."""

import configparser
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from places import ROOT

MIN_SETUPTOOLS = 77  # as pyproject.toml asks
LOAD_FULL = (
    "import sglang_blockreuse\n"
    "from sglang_blockreuse.layers.plan_loader import load_plan\n"
    "print(sglang_blockreuse.__file__, load_plan('full').bind(2, None).is_dense)"
)


def python(code, *, cwd, path=""):
    """Run code in a fresh interpreter in `cwd`; `path` comes before what is installed."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PYTHONPATH": str(path)}
    run = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def copy_tree(target):
    ignore = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "blockreuse-demo")
    return Path(shutil.copytree(ROOT, target, symlinks=True, ignore=ignore))


@pytest.fixture(scope="module")
def setuptools_path(tmp_path_factory):
    """Where the build backend is: what is installed already if it is new enough, so that no network is needed."""
    try:
        if int(importlib.metadata.version("setuptools").split(".")[0]) >= MIN_SETUPTOOLS:
            return ""
    except importlib.metadata.PackageNotFoundError:
        pass
    folder = tmp_path_factory.mktemp("backend")
    command = ["install", "--quiet", "--target", folder, f"setuptools>={MIN_SETUPTOOLS}"]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    return str(folder)


def build(kind, tree, out, setuptools_path):
    """Build a wheel or an sdist by the hook that pip itself calls."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    python(code, cwd=tree, path=setuptools_path)
    return next(path for path in out.iterdir() if path.suffix == (".whl" if kind == "wheel" else ".gz"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, setuptools_path):
    tree = copy_tree(tmp_path_factory.mktemp("copy") / "tree")
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"), setuptools_path)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory, setuptools_path):
    tree = copy_tree(tmp_path_factory.mktemp("copy") / "tree")
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"), setuptools_path)


def names_in(wheel):
    """Files of the wheel, its metadata folder apart."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def shipped_files():
    """Every file that the package must carry, as the wheel names it."""
    package = ROOT / "sglang_blockreuse"
    own = {path for path in package.rglob("*.py") if "__pycache__" not in path.parts}
    linked = {package / "kernels" / path.name for path in (ROOT / "kernels").glob("*.py")}
    plans = {package / "layer_plans" / path.name for path in (ROOT / "layer_plans").glob("*.yaml")}
    return {str(path.relative_to(ROOT)) for path in own | linked | plans | {package / "py.typed"}}


def test_the_wheel_carries_every_module_kernel_and_plan(wheel):
    expected = shipped_files()
    assert {"sglang_blockreuse/kernels/reference.py", "sglang_blockreuse/layer_plans/full.yaml"} <= expected
    assert expected - names_in(wheel) == set()


def test_the_wheel_takes_no_import_name_but_ours(wheel):
    assert {name.split("/")[0] for name in names_in(wheel)} == {"sglang_blockreuse"}
    with zipfile.ZipFile(wheel) as archive:
        top_level = next(name for name in archive.namelist() if name.endswith("/top_level.txt"))
        assert archive.read(top_level).split() == [b"sglang_blockreuse"]


def test_a_wheel_built_from_the_sdist_is_the_same(wheel, sdist, tmp_path, setuptools_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = next(path for path in tmp_path.iterdir() if path.is_dir())
    out = tmp_path / "out"
    out.mkdir()
    assert names_in(build("wheel", tree, out, setuptools_path)) == names_in(wheel)


@pytest.mark.parametrize("unpacked", [True, False], ids=["unpacked", "inside the zip"])
def test_plans_load_by_name_from_the_wheel(wheel, tmp_path, unpacked):
    path = wheel
    if unpacked:
        path = tmp_path / "site"
        zipfile.ZipFile(wheel).extractall(path)
    file, dense = python(LOAD_FULL, cwd=tmp_path, path=path).split()
    assert file.startswith(str(path))
    assert dense == "True"


def test_both_entry_points_carry_the_one_name_that_sglang_filters_by(wheel):
    entries = configparser.ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        entries.read_string(archive.read(name).decode())
    assert list(entries["sglang.srt.plugins"]) == ["blockreuse"]
    assert list(entries["sglang.srt.platforms"]) == ["blockreuse"]
    assert list(entries["console_scripts"]) == ["sglang-blockreuse"]


def test_kernels_in_the_repository_root_is_still_the_hosts_dependency(tmp_path):
    code = "import kernels; print(kernels.__file__, hasattr(kernels, 'get_kernel'))"
    file, is_hugging_face = python(code, cwd=ROOT).split()
    assert not Path(file).is_relative_to(ROOT)
    assert is_hugging_face == "True"

    # an __init__.py is all it takes to shadow it
    tree = copy_tree(tmp_path / "tree")
    (tree / "kernels" / "__init__.py").touch()
    file, is_hugging_face = python(code, cwd=tree).split()
    assert Path(file).is_relative_to(tree)
    assert is_hugging_face == "False"


@pytest.mark.parametrize("folder", ["kernels", "layer_plans"])
def test_the_two_outer_folders_are_linked_and_no_packages(folder):
    link = ROOT / "sglang_blockreuse" / folder
    assert link.readlink() == Path("..") / folder
    assert not (ROOT / folder / "__init__.py").exists()
