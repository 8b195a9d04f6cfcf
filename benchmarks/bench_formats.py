"""``hf_fastpath/bench/formats.py`` as a script of the checkout."""

from hf_fastpath.bench.formats import main

if __name__ == "__main__":
    raise SystemExit(main())
