"""Agreement of a module's passes on two frameworks.

A kink of ReLU, max pooling or a sort moves torch's own gradient when its input and parameters change by 1e-6. Each tolerance is therefore
at least that change; a module that changes by more than `MAX_SHIFT` tolerances is not accepted as a test.
"""

import numpy as np

LOGITS, GRADIENTS, LOSSES = 1e-5, 1e-4, 1e-4  # relative
PARAMETER = 1e-3  # of a single parameter's gradient, relative to it; parts below a thousandth of the whole gradient count as that
BUFFERS = {"rtol": 1e-4, "atol": 1e-5}
MAX_SHIFT = 30


def difference(actual, expected):
    """‖a − b‖ / ‖b‖."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def flat(arrays, prefix="gradient "):
    """All gradients as one vector."""
    return np.concatenate([arrays[key].ravel().astype(np.float64) for key in sorted(arrays) if key.startswith(prefix)])


def problem_of(actual, expected):
    """The first disagreement of TensorFlow's pass with torch's, "" if there is none."""
    if sorted(key for key in expected if not key.startswith("shift ")) != sorted(actual):
        return f"different arrays: {sorted(set(expected) ^ set(actual))}"
    pairs = {
        "evaluated logits": (LOGITS, difference(actual["evaluated"], expected["evaluated"]), expected["shift evaluated"]),
        "logits": (LOGITS, difference(actual["trained"], expected["trained"]), expected["shift trained"]),
        "gradient": (GRADIENTS, difference(flat(actual), flat(expected)), expected["shift gradient"]),
        "losses": (LOSSES, difference(actual["losses"], expected["losses"]), expected["shift losses"]),
    }
    for name, (tolerance, apart, shift) in pairs.items():
        if not apart <= max(tolerance, float(shift)):
            return f"{name}: {apart:.1e} apart, {max(tolerance, float(shift)):.1e} allowed"
        if shift > MAX_SHIFT * tolerance:
            return f"{name}: torch itself moves by {float(shift):.1e}"
    return _problem_of_parts(actual, expected)


def _problem_of_parts(actual, expected):
    whole = np.linalg.norm(flat(expected))
    allowed = PARAMETER * max(1.0, float(expected["shift gradient"]) / GRADIENTS)
    for key in expected:
        if key.startswith("gradient "):
            apart = np.linalg.norm(actual[key] - expected[key])
            if not apart <= allowed * max(np.linalg.norm(expected[key]), whole / 1000):
                return f"{key}: {apart:.1e} apart of {np.linalg.norm(expected[key]):.1e}"
        if key.startswith("buffer ") and not np.allclose(actual[key], expected[key], **BUFFERS):
            return f"{key}: {np.abs(actual[key] - expected[key]).max():.1e} apart"
    return ""
