"""Logistic regression for the toy: forward and backward by hand."""


def forward(parameters, x_bchw):
    return x_bchw.reshape(len(x_bchw), -1) @ parameters["dense.weight"].T + parameters["dense.bias"]


def backward(parameters, x_bchw, error_bk):
    return {"dense.weight": error_bk.T @ x_bchw.reshape(len(x_bchw), -1), "dense.bias": error_bk.sum(axis=0)}
