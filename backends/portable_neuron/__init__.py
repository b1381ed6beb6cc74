"""AWS Trainium through the native `torch-neuronx` (TorchNeuron), device type ``neuron``.

Nothing here has run on a Trainium device. The facts come from AWS's documentation and from public sources of the package's
pre-release; each says which. See docs/backends.md.
"""

from __future__ import annotations

from portable.backend import Backend
from portable.hookspecs import hookimpl


@hookimpl
def portable_backend() -> Backend:
    from portable_neuron.backend import NeuronBackend

    return NeuronBackend()
