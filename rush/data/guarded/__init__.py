"""Programs of strangers in a process of their own, with limits on time and memory.

A chat template is a Jinja program, and a tokenizer.json holds regular expressions, replacements and ids: both come with a
model, and both can run forever, ask for a terabyte or abort the process they run in. So templates are rendered, and
tokenizers are tried, in a child process (`child.py`) that the kernel stops at its limits. Our own templates, and tokenizers
that were tried before, need no child.

    process.py    starts the child, asks it, and says why it died
    child.py      the loop of the child: limits, a request, a reply
    rendering.py  renders chat templates; also imported by our own process, for our own templates
    trial.py      loads a tokenizer and encodes a few texts

`child.py` is executed as a file and loads the other two as files: it imports neither rush nor numpy, and is up in some 30 ms.
"""
