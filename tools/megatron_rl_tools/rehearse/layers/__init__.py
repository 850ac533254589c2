"""A stand-in for the package transformer_engine: its layers and kernels by shape.

Shapes, dtypes, devices, saved tensors and collectives are those of TransformerEngine 2.11.0, the
newest release that megatron-core 0.16.1 and 0.19.2 both accept; each class names the file whose
forward and backward it follows.  Nothing is computed, and quantized numbers are not supported.
megatron-core's own classes (TELinear, TEGroupedLinear, ...) are built on it as on the real package.
"""

from megatron_rl_tools.rehearse.layers.package import install

__all__ = ["install"]
