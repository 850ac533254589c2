"""megatron-rl rehearse: a step of the real engine, at full size, on pretended GPUs.

CUDA tensors have shapes, dtypes and devices, but no values and no memory (torch's FakeTensor); CPU
tensors are real.  A collective exchanges its description between the ranks instead of data.

native.py, device.py    the pretended GPU
recorder.py             the record of operations, memory and waits
values.py               small tensors whose values are known all the same
groups.py, switchboard.py   process groups that compare what their ranks call
layers.py               TransformerEngine's layers by shape
"""
