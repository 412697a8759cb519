"""A class as a JSON schema, and as a function that has to be called, which is what the client does where nothing is said."""

from typing import Literal

from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from rows import ABOUT, MODEL, URL, feature

COMMON = {"api_base": f"{URL}/v1", "api_key": "unused", "max_retries": 0, "timeout": 120}
COMMON |= {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048}
COMMON |= {"temperature": 0, "max_tokens": 100}


class Wheel(BaseModel):
    """A wheel."""

    kind: Literal["cart", "water", "potter"]
    spokes: Literal[4, 6, 8]
    turns: bool


@feature("structured")
def structured():
    for by_schema in (True, False):
        model = OpenAILike(model=MODEL, should_use_structured_outputs=by_schema, **COMMON)
        answer = model.structured_predict(Wheel, PromptTemplate(ABOUT))
        assert isinstance(answer, Wheel), (by_schema, answer)
