"""The experiments behind `overlap myths`, on the GPU that CUDA calls 0 (harness/claims.py has what they settle).

Work that must still be queued when the host goes on is held up by a spin of known length, as in the harness's own
controls.
"""
