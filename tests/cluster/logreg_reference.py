"""Logistic regression and update rules in float64 numpy, from the formulas alone.

Backends are compared with it.
"""

import numpy as np


class Reference:
    """Weights [classes, features] and bias [classes], trained by sgd, adam or adamw.

    torch's formulas.
    """

    def __init__(self, initial, job):
        self.w = {name: value.astype(np.float64) for name, value in initial.items()}
        self.job = job
        self.t = 0
        self.first = {name: np.zeros_like(value) for name, value in self.w.items()}
        self.second = {name: np.zeros_like(value) for name, value in self.w.items()}

    def losses(self, x, y):
        """The loss of every example, and the probabilities."""
        z = x.astype(np.float64) @ self.w["dense.weight"].T + self.w["dense.bias"]
        z -= z.max(axis=1, keepdims=True)
        p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        return np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(y)), y], p

    def gradients(self, x, y):
        _, p = self.losses(x, y)
        error = (p - np.eye(p.shape[1])[y]) / len(y)
        return {"dense.weight": error.T @ x.astype(np.float64), "dense.bias": error.sum(axis=0)}

    def step(self, x, y, lr):
        """One update; returns the mean loss before it."""
        loss = self.losses(x, y)[0].mean()
        self.apply(self.gradients(x, y), lr)
        return loss

    def apply(self, gradients, lr):
        job = self.job
        self.t += 1
        for name, g in gradients.items():
            w = self.w[name]
            if job.optimizer == "adamw":
                w = w * (1 - lr * job.weight_decay)
            else:
                g = g + job.weight_decay * w
            if job.optimizer == "sgd":
                b = self.first[name] = job.momentum * self.first[name] + g
                w = w - lr * (g + job.momentum * b if job.nesterov else b)
            else:
                m = self.first[name] = job.beta1 * self.first[name] + (1 - job.beta1) * g
                v = self.second[name] = job.beta2 * self.second[name] + (1 - job.beta2) * g**2
                w = w - lr / (1 - job.beta1**self.t) * m / (np.sqrt(v) / np.sqrt(1 - job.beta2**self.t) + job.epsilon)
            self.w[name] = w

    def evaluate(self, x, y):
        """Sum of losses, correct predictions."""
        losses, p = self.losses(x, y)
        return losses.sum(), int((p.argmax(axis=1) == y).sum())


def distance(a, b):
    """‖a − b‖ / ‖b‖ over all parameters."""
    difference = sum(float(((a[name] - b[name]) ** 2).sum()) for name in b)
    return np.sqrt(difference / sum(float((np.asarray(b[name]) ** 2).sum()) for name in b))
