"""What several declarations share: bounds of labels, and reasons for being absent."""

GPU = {"gpu": ("0",)}  # the one device of a daemon; `memd_gpu_info` tells which board it is
MODEL = {"model": "the served model"}

# The reference page explains these two.
NO_REPORT = "no report"
NO_GPU = "not told"
