"""Untrusted templates and tokenizers in a restricted child process, with limits on time and memory.

A chat template is a Jinja program, and a tokenizer.json contains regular expressions, replacements and ids: both come with a
model, and both can run forever, allocate a terabyte or abort their process. So templates are rendered, and tokenizers are
tested, in a child process (`child.py`) that the kernel stops at its limits. Our own templates, and tokenizers that passed the
test before, need no child.

    process.py    starts the child, sends requests, and reports why it died
    child.py      the loop of the child: limits, a request, a reply
    rendering.py  renders chat templates; also imported by our own process, for our own templates
    trial.py      loads a tokenizer and encodes a few texts

`child.py` is executed as a file and loads the other two as files: it imports neither rush nor numpy, and starts in some 30 ms.
"""
