"""lm-eval against a real model: choices by log-probabilities of an echoed prompt, rolling ones, generated texts."""

import json
import os
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from lm_eval import simple_evaluate
from rows import MODEL, URL, feature

FOLDER = Path(tempfile.mkdtemp())
os.environ["HF_HOME"] = str(FOLDER)
CHOICES = [
    {"text": "The capital of France is", "choices": [" Paris", " seven"], "label": 0},
    {"text": "Two plus two is", "choices": [" window", " four"], "label": 1},
    {"text": "Water freezes to", "choices": [" music", " ice"], "label": 1},
    {"text": "The opposite of hot is", "choices": [" cold", " Tuesday"], "label": 0},
    {"text": "Cats and dogs are", "choices": [" animals", " equations"], "label": 0},
    {"text": "The sun rises in the", "choices": [" soup", " east"], "label": 1},
]
PAGES = [
    "Water flows down a hill because gravity pulls on it. " * 4,
    "Once upon a time there was a miller.",
]
QUESTIONS = [
    {"text": "What is the capital of France?", "answer": "Paris"},
    {"text": "What is the capital of Italy?", "answer": "Rome"},
]


def task(name, rows, **fields):
    file = FOLDER / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        **fields,
    }


def evaluate(model, path, tasks, **arguments):
    chat = model == "local-chat-completions"
    options = {"model": MODEL, "base_url": f"{URL}{path}", "num_concurrent": 4, "max_length": 2048}
    if not chat:
        options["tokenizer_backend"] = (
            "remote"  # /tokenizer_info and /tokenize of the server itself
        )
    results = simple_evaluate(
        model=model,
        model_args=options | arguments,
        tasks=tasks,
        apply_chat_template=chat,
        log_samples=True,
    )
    return results["results"]


MULTIPLE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
GENERATED = {
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "temperature": 0.0},
    "filter_list": [
        {
            "name": "city",
            "filter": [
                {"function": "regex", "regex_pattern": "(Paris|Rome)"},
                {"function": "take_first"},
            ],
        }
    ],
    "metric_list": [{"metric": "exact_match"}],
}


@feature("evals")
def evals():
    rolling = task(
        "pages",
        [{"page": page} for page in PAGES],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{page}}",
        metric_list=[{"metric": "word_perplexity"}],
    )
    capitals = task("capitals", QUESTIONS, **GENERATED)
    tasks = [task("choices", CHOICES, **MULTIPLE), rolling, capitals]
    as_ids = evaluate("local-completions", "/v1/completions", tasks)
    assert as_ids["choices"]["acc,none"] >= 0.8, as_ids
    assert 1 < as_ids["pages"]["word_perplexity,none"] < 200, as_ids
    batched = evaluate("local-completions", "/v1/completions", tasks[:1], batch_size=4)
    assert batched["choices"]["acc,none"] == as_ids["choices"]["acc,none"], (batched, as_ids)
    chat = evaluate("local-chat-completions", "/v1/chat/completions", [capitals])
    assert chat["capitals"]["exact_match,city"] == 1, chat
