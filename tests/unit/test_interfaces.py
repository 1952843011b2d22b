"""The network interface that nccl and gloo use."""

import os

import pytest

from crosstrain.backends.base import find_interface, set_nccl_interface
from crosstrain.core.errors import RunFailedError


def test_address_belongs_to_an_interface():
    assert find_interface("127.0.0.1") == find_interface("127.0.0.9") == "lo"
    with pytest.raises(RunFailedError, match=r"192\.0\.2\.1; there are: .*127\.0\.0\.1"):
        find_interface("192.0.2.1")


@pytest.mark.parametrize(("user_value", "expected"), [(None, "=lo"), ("eth7", "eth7"), ("", "")])
def test_nccl_interface_is_of_node_unless_set_by_user(monkeypatch, user_value, expected):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "to be put back")
    if user_value is None:
        del os.environ["NCCL_SOCKET_IFNAME"]
    else:
        os.environ["NCCL_SOCKET_IFNAME"] = user_value
    set_nccl_interface("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == expected
