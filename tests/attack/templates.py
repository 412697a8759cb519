"""Chat templates that never end or grow without end, and messages that make a good one slow."""

from __future__ import annotations

import asyncio
import json
import time

from attack.attack import Attack, Outcome, Scale
from attack.memory import MIB
from attack.stack import Stack, start_workers, with_template
from attack.wire import Reply, ask, post, send, tally

DOUBLED = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
NESTED = "{% set ns = namespace(x=['a']) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}"
TWICE = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
LONG = "{% set ns = namespace(x='a') %}{% for i in range(26) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
FOREVER = LONG + "{% set ns.n = 0 %}{% for i in range(100000) %}"

KNOWN_S = 3.0  # a worker that is taken serves its model by then

EVIL = {
    "a list doubled 60 times": DOUBLED + "{{ ns.x | length }}",
    "a list in a list, 100,000 deep, printed": NESTED + "{{ ns.x }}",
    "a list in a list, 100,000 deep, dropped": NESTED + "done",
    "a list twice in itself, compared": TWICE
    + TWICE.replace("ns", "other")
    + "{{ ns.x == other.x }}",
    "a list twice in itself, printed": TWICE + "{{ ns.x }}",
    "a list twice in itself, in batches": TWICE + "{{ ns.x | batch(2) | list | length }}",
    "a long text replaced without end": FOREVER
    + "{% set ns.n = ns.x.replace('a', 'b') %}{% endfor %}",
    "a long text searched without end": FOREVER + "{% if 'b' in ns.x %}{% endif %}{% endfor %}",
    "a long text made upper case without end": FOREVER
    + "{% set ns.n = ns.x | upper %}{% endfor %}",
    "a long text sliced without end": FOREVER + "{% set ns.n = ns.x[1:] %}{% endfor %}",
    "a text joined with itself": "{{ (['a' * 1000] * 100000) | join('b' * 100000) }}",
    "a captured block that grows": "{% set x %}{% for i in range(100000) %}{% for j in range(1000) %}"
    + "word " * 100
    + "{% endfor %}{% endfor %}{% endset %}{{ x | length }}",
}

R1_LIKE = (
    "{% set ns = namespace(system_prompt='', is_first_sp=true) %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}"
    "{% set ns.is_first_sp = false %}"
    "{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}"
    "{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}"
    "{%- endif %}{%- endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
)


def evil(name: str, template: str) -> Attack:
    """Two models more, whose templates do this with every chat or with long ones; four chats of each at once."""

    async def run(stack: Stack, scale: Scale) -> Outcome:
        replies: list[Reply] = []
        for model, source in (("always", template), ("sometimes", SOMETIMES.format(template))):
            doc = with_template(stack.doc, source)
            workers = start_workers(
                stack.programs, stack.router, doc, count=1, name=model, flags=["--model", model]
            )
            try:
                replies += await ask_all(stack, model, scale.of(4))
            finally:
                workers.terminate()
                workers.wait(10)
        cheap = name.endswith(("dropped", "in batches"))  # as long as nobody copies what is in it
        fine = {"400", "404", "429", "503"} | ({"200"} if cheap else set[str]())
        return Outcome(tally(replies), all(reply.status in fine for reply in replies))

    # however small it is, it takes what one rendering may
    return Attack(name=f"template: {name}", run=run, most_mb=640, slice_mb=640)


# a model whose template cannot render a short message is refused when it is described
SOMETIMES = (
    "{{% if messages[0].content | length > 10 %}}{}{{% endif %}}{{{{ messages[0].content }}}}"
)


async def ask_all(stack: Stack, model: str, count: int) -> list[Reply]:
    """A long chat, so many times at once, as soon as the router knows the model; 404 if it never does."""
    content = "a message of more than ten characters"
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    give_up = time.monotonic() + KNOWN_S
    while True:
        replies = [await ask(stack.router, "/v1/chat/completions", body)]
        if replies[0].status not in {"404", "503"} or time.monotonic() > give_up:
            break
        await asyncio.sleep(0.1)
    return replies + await asyncio.gather(
        *(ask(stack.router, "/v1/chat/completions", body) for _ in range(count - 1))
    )


async def joined(stack: Stack, scale: Scale) -> Outcome:
    """4 and 16 MB of short system messages to a template that joins them, as DeepSeek-R1's does."""
    replies: list[Reply] = []
    for size in (scale.of(4 * MIB), scale.of(15 * MIB)):
        part = {"role": "system", "content": "x" * 40}
        count = size // len(json.dumps(part))
        messages = [part] * count + [{"role": "user", "content": "hi"}]
        body = json.dumps({"model": stack.model, "messages": messages, "max_tokens": 1}).encode()
        replies.append(await send(stack.router, post(stack.router, "/v1/chat/completions", body)))
    return Outcome(tally(replies), all(reply.status in {"400", "413"} for reply in replies))


ATTACKS = [
    *(evil(name, template) for name, template in EVIL.items()),
    Attack(
        name="4 and 15 MiB of system messages to R1's template",
        run=joined,
        most_mb=640,
        slice_mb=640,
        template=R1_LIKE,
    ),
]
