"""What is covered: named models, and random modules by seed."""

from pathlib import Path

FOLDER = Path(__file__).parent
SEEDS = range(200)
MODULES = {f"module {seed}": f"{FOLDER / 'blocks.py'}:drawn?seed={seed}" for seed in SEEDS}
_VISION = ("vgg11_bn", "resnet18", "resnet50", "densenet121", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "vit", "swin_t")
_TEXT = ("gru", "lstm", "encoder", "bert", "distilbert", "gpt2")
MODELS = {
    **{name: f"{FOLDER / 'named.py'}:torchvision_model?name={name}" for name in _VISION},
    **{name: f"{FOLDER / 'named.py'}:text_model?name={name}" for name in _TEXT},
    "vit of transformers": f"{FOLDER / 'named.py'}:transformers_vit",
}
