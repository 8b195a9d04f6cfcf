"""Logits processors of packages that hold a text to a grammar."""

from __future__ import annotations

from typing import Any

#: classes whose processors take chances from tokens, by the newest token of each row, and do nothing else: the module
#: and the name of each. Seen in xgrammar 0.2.9 and outlines 1.3.3, whose other back ends fill masks of llguidance and
#: outlines-core. Remove a row when its class does more.
_GRAMMARS = frozenset(
    {
        ("xgrammar.contrib.hf", "LogitsProcessor"),
        ("outlines.backends.xgrammar", "XGrammarLogitsProcessor"),
        ("outlines.backends.llguidance", "LLGuidanceLogitsProcessor"),
        ("outlines.backends.outlines_core", "OutlinesCoreLogitsProcessor"),
    }
)
#: what these classes call of themselves for a token
_METHODS = ("__call__", "process_logits", "bias_logits", "_bias_logits")


def is_grammar(processor: Any) -> bool:
    """Whether a processor only sets scores to ``-inf``, of tokens that the text so far tells. Classes that are derived
    from a known one may do more."""
    kind = type(processor)
    if (kind.__module__, kind.__qualname__) not in _GRAMMARS:
        return False
    # outlines binds a method of the same class to the instance, by the library of the tensors
    own = (vars(processor)[name] for name in _METHODS if name in vars(processor))
    return all(getattr(each, "__func__", None) in vars(kind).values() for each in own)
