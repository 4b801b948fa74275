"""A daemon that raises the GPU's minimum clock while MoE inference takes turns between CPU and GPU."""

__version__ = "0.1.0"
