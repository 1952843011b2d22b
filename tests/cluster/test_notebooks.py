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


CELL = "import crosstrain as ct; ct.run(model='logreg', data='digits', backend='torch', epochs=9, eval_every='1epoch', name='nine');"


def test_progress_is_one_output_of_a_cell(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[0].outputs
    shown = [output["data"]["text/plain"] for output in outputs if output["output_type"] == "display_data"]
    (text,) = shown
    assert "evaluated after step 405  epoch 9" in text
    assert "evaluated" not in "".join(output.get("text", "") for output in outputs)


def test_code_of_the_page_runs(repository, tmp_path):
    (code,) = blocks(repository / "docs/from-python.md", "python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Comparison of 4 runs" in done.stdout
