"""The notebooks of the examples run, and show conclusions and plots."""

import os
import subprocess
import sys

import pytest
from documents import blocks

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]


@pytest.mark.parametrize("name", ["compare_my_model", "homework"])
def test_notebook_runs_to_its_end(repository, tmp_path, name):
    notebook = tmp_path / f"{name}.ipynb"
    notebook.write_bytes((repository / "examples" / notebook.name).read_bytes())
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "html", str(notebook)]
    environment = {**os.environ, "TRAINER_DATA_CACHE": str(tmp_path / "cache"), "JUPYTER_RUNTIME_DIR": str(tmp_path / "jupyter")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    page = notebook.with_suffix(".html").read_text(encoding="utf-8")
    assert "Comparison of" in page
    assert page.count("data:image/png") >= 1
    assert "Traceback" not in page


def test_code_of_the_page_runs(repository, tmp_path):
    (code,) = blocks(repository / "docs/from-python.md", "python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Comparison of 4 runs" in done.stdout
