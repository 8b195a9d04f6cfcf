"""``hf_fastpath/bench/generate.py`` as a script of the checkout."""

from hf_fastpath.bench.generate import main

if __name__ == "__main__":
    raise SystemExit(main())
