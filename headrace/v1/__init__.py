"""The gRPC interface `headrace.v1.Inference`: its definition and the stubs made from it by `generate.py`."""
