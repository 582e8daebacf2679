"""The process that compiles grammars for a router: `python -m router.grammars.child LIMIT_S MODEL_PATH`.

Reads one JSON line per grammar, `[kind, text]`, and writes one, the reason why it cannot be carried out, "" where it
can. The first line it writes says that it is ready. It ends with its standard input and, by an alarm that reaches it
even inside the library, some seconds after a compile should have ended: it does not outlive its router for long,
whatever becomes of that. On the processor it gives way to everybody.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

from headrace.grammar import GrammarCompiler, GrammarFault
from headrace.sampling import Grammar, GrammarKind
from headrace.tokenizer import Tokenizer

NICER = 5
"""Steps of niceness below the router."""
MAX_MEMORY_BYTES = 4 << 30
"""Of address space; a grammar that needs more ends this process, not the machine."""
ALARM_AFTER_S = 5.0
"""After the limit at which the router kills."""


def main() -> None:
    limit_s, model_path = float(sys.argv[1]), sys.argv[2]
    os.nice(NICER)
    _limit_memory()
    compiler = GrammarCompiler(Tokenizer.load(model_path))
    compiler.prepare()
    _say("ready")
    for line in sys.stdin:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s + ALARM_AFTER_S)
        reason = _reason_against(compiler, Grammar(GrammarKind(kind), text))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(reason)


def _reason_against(compiler: GrammarCompiler, grammar: Grammar) -> str:
    try:
        compiler.compile(grammar)
    except GrammarFault as fault:
        return str(fault) or "it cannot be compiled"
    return ""


def _say(text: str) -> None:
    print(json.dumps(text), flush=True)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


if __name__ == "__main__":
    main()
