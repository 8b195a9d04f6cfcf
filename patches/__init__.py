"""Architectures, one small declarative file each. See :mod:`hf_fastpath.architecture` for the vocabulary."""

if __name__ == "patches":
    raise ImportError("import hf_fastpath.patches instead: the top-level name `patches` is only this folder's name")
