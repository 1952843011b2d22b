"""Messages without a type, as broken, hostile and other programs send them."""

import json

import numpy as np

from crosstrain.engine.protocol import messages
from crosstrain.engine.protocol.messages import RawArray


class Message(messages.Message):
    """Message of any kind, with these fields and arrays."""

    __slots__ = ("fields",)

    def __init__(self, kind, fields=None, arrays=None):
        self.fields = dict(fields or {})
        raw = {name: array if isinstance(array, RawArray) else raw_array(array) for name, array in (arrays or {}).items()}
        listed = [[name, array.dtype, list(array.shape), len(array.data)] for name, array in raw.items()]
        header = {"kind": kind, **self.fields, **({"arrays": listed} if listed else {})}
        super().__init__(kind, json.dumps(header, separators=(",", ":")).encode(), raw, self.fields.get("to"))

    def __getitem__(self, name):
        return self.fields[name]

    def __eq__(self, other):
        return isinstance(other, messages.Message) and (self.kind, self.fields, self.arrays) == (other.kind, fields_of(other), other.arrays)

    __hash__ = None

    def array(self, name):
        return array_of(self, name)


def raw_array(array):
    flat = np.ascontiguousarray(array)
    return RawArray(flat.dtype.str, np.shape(array), flat.tobytes())


def array_of(message, name):
    """Return an array of a message that has arrived."""
    raw = message.arrays[name]
    return np.frombuffer(raw.data, raw.dtype).reshape(raw.shape)


def fields_of(message):
    """Return the fields of a message that has arrived."""
    return {name: value for name, value in json.loads(message.line).items() if name not in ("kind", "arrays")}
