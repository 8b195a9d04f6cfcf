"""``hf_fastpath/bench/layouts.py`` as a script of the checkout."""

from hf_fastpath.bench.layouts import main

if __name__ == "__main__":
    raise SystemExit(main())
