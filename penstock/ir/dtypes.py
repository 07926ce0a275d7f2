"""The dtypes that are supported, by torch's names.

`capture/dtypes.py` has the properties that torch gives them, such as complex numbers as pairs of real ones. Which of
them checkpoints can hold is in `checkpoint/tensor_file.py`, and how they are sent in `runtime/transports/base.py`
(`TensorCodec`).
"""

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2", "quint8", "qint8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32", "qint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""bytes of one element"""
FLOATING_POINT = frozenset(name for name in ITEM_BYTES if name.startswith(("float", "bfloat")))
"""rounded real numbers, as torch's `is_floating_point`; not complex numbers"""
INTEGERS = frozenset(name for name in ITEM_BYTES if name.startswith(("int", "uint")))
"""neither bool nor quantized numbers"""
TOLERANCES = {
    **dict.fromkeys(("float64", "complex128"), 1e-12),
    **dict.fromkeys(("float32", "complex64"), 1e-5),
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""how far apart the results of two runs of a model may be, relative to the largest entry; 0 for other dtypes"""
