"""Models that people use, small: of images of 64 pixels, of 32 tokens. torch alone."""

import torch
from torch import nn

SIDE, TOKENS, KINDS_OF_TOKENS, WIDTH = 64, 32, 50, 32


class Shifted(nn.Module):
    """A model of images whose pixels are changed in their last bits."""

    def __init__(self, model, shift):
        super().__init__()
        self.model, self.shift = model, shift

    def forward(self, x):
        return self.model(x * (1 + self.shift))


def torchvision_model(name, num_classes, shift=0.0):
    import torchvision

    if name == "vit":
        model = torchvision.models.VisionTransformer(SIDE, 16, 2, 2, WIDTH, 64, dropout=0.1, num_classes=num_classes)
    else:
        model = getattr(torchvision.models, name)(num_classes=num_classes)
    return Shifted(model, shift) if shift else model


class Read(nn.Module):
    """A model of tokens [b, 32] on images, whose first pixels are the tokens."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        tokens = (x[:, 0].flatten(1)[:, :TOKENS] * 10).long().remainder(KINDS_OF_TOKENS)
        y = self.model(tokens)
        return y if isinstance(y, torch.Tensor) else y.logits


class Recurrent(nn.Module):
    def __init__(self, kind, num_classes):
        super().__init__()
        self.table = nn.Embedding(KINDS_OF_TOKENS, WIDTH)
        self.layers = kind(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(2 * WIDTH, num_classes)

    def forward(self, tokens):
        return self.head(self.layers(self.table(tokens))[0].mean(1))


class Encoder(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.table, self.places = nn.Embedding(KINDS_OF_TOKENS, WIDTH, padding_idx=0), nn.Embedding(TOKENS, WIDTH)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True), 2)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, tokens):
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.encoder(x, src_key_padding_mask=tokens == 0).mean(1))


def text_model(name, num_classes):
    if name in ("gru", "lstm"):
        return Read(Recurrent({"gru": nn.GRU, "lstm": nn.LSTM}[name], num_classes))
    if name == "encoder":
        return Read(Encoder(num_classes))
    return Read(_transformers_model(name, num_classes))


def _transformers_model(name, num_classes):
    import transformers

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "num_labels": num_classes}
    text = {"vocab_size": KINDS_OF_TOKENS, "max_position_embeddings": TOKENS}
    if name == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **text))
    if name == "distilbert":
        config = transformers.DistilBertConfig(dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=64, num_labels=num_classes, **text)
        return transformers.DistilBertForSequenceClassification(config)
    if name == "gpt2":
        sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": TOKENS, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2ForSequenceClassification(
            transformers.GPT2Config(vocab_size=KINDS_OF_TOKENS, num_labels=num_classes, **sizes)
        )
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=SIDE, patch_size=16, **sizes))


def transformers_vit(num_classes):
    return _transformers_model("vit", num_classes)
