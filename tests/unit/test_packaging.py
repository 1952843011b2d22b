"""The package list matches the tree; the wheel is complete and works outside the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

NO_PACKAGES = {"tests", "docs", "benchmarks", "examples", "build", "dist", "runs"}


@pytest.fixture(scope="module")
def project(repository):
    return tomllib.loads((repository / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory):
    """Build a wheel from a copy, so that no earlier build is included."""
    folder = tmp_path_factory.mktemp("wheel")
    anywhere = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")

    def ignored(place: str, names: list[str]) -> set[str]:
        return anywhere(place, names) | (NO_PACKAGES - {"docs"} if place == str(repository) else set())

    shutil.copytree(repository, folder / "source", ignore=ignored)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("crosstrain-*.whl")
    return path


def tree(repository):
    packages = set()
    for path in repository.rglob("__init__.py"):
        parts = path.relative_to(repository).parts[:-1]
        if not {*parts[:1]} & NO_PACKAGES and not any(part.startswith(".") for part in parts):
            packages.add(".".join(("crosstrain", *parts)))
    return packages


def test_package_list_matches_the_tree(repository, project):
    packages = project["tool"]["setuptools"]["packages"]
    assert sorted(packages) == sorted(tree(repository))
    top = {name: name.partition(".")[2] or "." for name in packages if name.count(".") <= 1}
    assert project["tool"]["setuptools"]["package-dir"] == top


def test_packages_are_typed_and_described(repository, project):
    for package in project["tool"]["setuptools"]["packages"]:
        folder = repository.joinpath(*package.split(".")[1:])
        assert (folder / "py.typed").is_file() == (package.count(".") <= 1), package
        first = (folder / "__init__.py").read_text(encoding="utf-8")
        assert first.startswith('"""'), package
        assert "TODO" not in first, package


def test_extras_include_each_other(project):
    extras = project["project"]["optional-dependencies"]
    assert {"tf", "torch", "all", "bench", "dev"} <= set(extras)
    assert extras["all"] == ["crosstrain[tf,torch,gpu,parquet,text]"]
    frameworks = ("tensorflow", "torch", "torchvision")
    assert not [name for name in project["project"]["dependencies"] if name.startswith(frameworks)]


@pytest.mark.thorough
def test_wheel_holds_all_files_of_the_packages(repository, project, wheel):
    expected = set()
    for package in project["tool"]["setuptools"]["packages"]:
        folder = repository.joinpath(*package.split(".")[1:])
        kept = [path for path in folder.iterdir() if path.suffix in {".py", ".toml"} or path.name == "py.typed"]
        kept = [path for path in kept if path.name != "pyproject.toml"]
        expected |= {f"{package.replace('.', '/')}/{path.name}" for path in kept}
    templates = "report/pages/templates"
    expected |= {f"crosstrain/{templates}/{path.name}" for path in (repository / templates).iterdir()}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert names == expected


@pytest.mark.thorough
def test_wheel_works_where_it_is_installed(project, wheel, tmp_path, make_environment):
    python = make_environment(tmp_path / "env", ["crosstrain", "__editable__"])
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, env={"PATH": "/usr/bin:/bin", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HOME": str(tmp_path)})
    script = (
        f"import importlib\nfor name in {project['tool']['setuptools']['packages']}:\n    print(importlib.import_module(name).__file__)"
    )

    def call(*command):
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    places = call(str(python), "-c", script).splitlines()
    assert len(places) == len(project["tool"]["setuptools"]["packages"])
    assert all(place.startswith(str(tmp_path / "env")) for place in places)
    trainer = str(tmp_path / "env" / "bin" / "trainer")
    assert call(trainer, "--version") == f"trainer {project['project']['version']}\n"
    assert "file quickstart.toml (shipped)" in call(trainer, "run", "--config", "quickstart", "--backend", "tf", "--print-config")
