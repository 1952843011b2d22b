"""The toy backend with minimum capabilities: sync training in fp32 on the CPU."""

from crosstrain_toy import ToyBackend

from crosstrain.backends.capabilities import Capabilities


class LeastToyBackend(ToyBackend):
    name = "least-toy"
    capabilities = Capabilities(packages={"numpy": ["numpy"]})


BACKEND = LeastToyBackend()
