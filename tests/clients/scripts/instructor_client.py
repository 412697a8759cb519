import instructor
import openai
from pydantic import BaseModel
from rows import MODEL, URL, feature

plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0, timeout=60)


class Wheel(BaseModel):
    name: str
    height: int


@feature("structured")
def structured():
    for mode in (instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        answer = instructor.from_openai(plain, mode=mode).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Describe the wheel"}],
            response_model=Wheel,
            max_retries=0,
        )
        assert (answer.name, answer.height) == ("wheel", 7), (mode, answer)
