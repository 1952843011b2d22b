"""Programs that load an export with plain libraries and write its logits.

Each reads images.npy and writes logits.npy, in the folder of the export, and must not import crosstrain.
"""

SAVEDMODEL = """
import numpy as np, tensorflow as tf
model = tf.saved_model.load(".")
x = np.load(IMAGES)
logits = model.signatures["serving_default"](images=tf.constant(x))["logits"].numpy()
one = model.signatures["serving_default"](images=tf.constant(x[:1]))["logits"].numpy()
assert one.shape == (1, logits.shape[1])
pixels = np.load(PIXELS)
table = ((np.arange(256, dtype=np.float64) / 255.0 - 0.5) / 0.25).astype(np.float32)
assert np.array_equal(table[pixels], x)
raw = model.signatures["pixels"](images=tf.constant(pixels))["logits"].numpy()
assert np.array_equal(raw, logits)
watched = tf.constant(x[:1])
with tf.GradientTape() as tape:
    tape.watch(watched)
    served = model.signatures["serving_default"](images=watched)["logits"]
assert np.abs(tape.gradient(served, watched)).max() > 0  # it can be built on, not only served
"""

TF_CHECKPOINT = """
import json
import numpy as np, tensorflow as tf
described = json.load(open("model.json"))
weights = {name: tf.Variable(tf.zeros(shape)) for name, shape in described["parameters"] + described["buffers"]}
tf.train.Checkpoint(**weights).read("weights").assert_consumed()
np.savez(LOGITS, **{name: value.numpy() for name, value in weights.items()})
"""

TORCH_PROGRAM = """
import numpy as np, torch
program = torch.export.load("program.pt2").module()
x = torch.from_numpy(np.load(IMAGES))
logits = program(x).detach().numpy()
for size in (1, 3):
    assert np.allclose(program(x[:size]).detach().numpy(), logits[:size], rtol=1e-4, atol=1e-4)
"""

TORCHVISION = """
import numpy as np, torch, torchvision
model = getattr(torchvision.models, MODEL)(num_classes=10)
model.load_state_dict(torch.load("state_dict.pt", weights_only=True), strict=True)
model.eval()
with torch.no_grad():
    logits = model(torch.from_numpy(np.load(IMAGES))).numpy()
"""

SAFETENSORS = """
import numpy as np
from safetensors.numpy import load_file
np.savez(LOGITS, **load_file("model.safetensors"))
from safetensors import safe_open
import json
with safe_open("model.safetensors", "np") as file:
    metadata = file.metadata()
described = json.load(open("model.json"))
assert metadata.pop("format") == "np"
assert (metadata["model"], metadata["normalisation"]) == (MODEL, described["normalisation"])
for key in ("mean", "std", "input_shape", "class_names", "updates", "averaged_checkpoints"):
    assert json.loads(metadata[key]) == described[key], key
"""

ENDING = """
import sys
assert not [name for name in sys.modules if name.startswith("crosstrain")]
if "logits" in globals():
    np.save(LOGITS, logits)
"""

OURS = """
import sys
from pathlib import Path
import numpy as np, torch
from crosstrain.checkpoint import read_checkpoint
from crosstrain.core import plugins
from crosstrain.models.base import ForwardContext
found = read_checkpoint(Path(CHECKPOINT))
forward = plugins.load(plugins.forward_plugin(MODEL, "torch"), "forward").forward
tensors = [{name: torch.tensor(value) for name, value in values.items()} for values in (found.parameters, found.buffers)]
with torch.no_grad():
    logits = forward(tensors[0], torch.from_numpy(np.load(IMAGES)), ForwardContext(training=False, buffers=tensors[1])).numpy()
np.save(LOGITS, logits)
"""

EVERY_SIZE = """
import sys
from pathlib import Path
import numpy as np
from crosstrain.backends.export import export_weights
from crosstrain.checkpoint import read_checkpoint
from crosstrain.checkpoint.selection import ChosenWeights
root, backend, format_name, *checkpoints = sys.argv[1:]
for number, path in enumerate(checkpoints):
    checkpoint, folder = read_checkpoint(Path(path)), Path(root, str(number))
    folder.mkdir()
    export_weights(backend, format_name, ChosenWeights((checkpoint,), "trained"), folder)
    x = np.random.default_rng(0).standard_normal((40, *checkpoint.meta.data["input_shape"])).astype(np.float32)
    if format_name == "torch":
        import torch
        exported = torch.export.load(folder / "program.pt2")
        assert exported.graph_signature.user_inputs == ("images",), exported.graph_signature.user_inputs
        assert exported.graph_signature.user_outputs == ("logits",), exported.graph_signature.user_outputs
        run = lambda x: exported.module()(torch.from_numpy(x)).detach().numpy()
        assert {*torch.load(folder / "state_dict.pt", weights_only=True)} >= {*checkpoint.parameters, *checkpoint.buffers}
    elif format_name == "savedmodel":
        import tensorflow as tf
        serve = tf.saved_model.load(str(folder)).signatures["serving_default"]
        run = lambda x: serve(images=tf.constant(x))["logits"].numpy()
    else:
        continue
    logits = run(x)
    assert logits.shape == (40, 10) and np.isfinite(logits).all()
    for batch in 1, 3:  # of any size
        assert np.allclose(run(x[:batch]), logits[:batch], rtol=1e-3, atol=1e-3), (path, batch)
print("exported", len(checkpoints))
"""
