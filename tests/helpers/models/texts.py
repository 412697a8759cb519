"""Beginnings of texts of many kinds, for a model with real weights to go on with."""

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Photosynthesis is the process by which",
    "def fibonacci(n):\n    ",
    "The three states of matter are",
    "In 1969, for the first time,",
    "To bake bread you need",
    "The difference between a virus and a bacterium is that",
    "Dear Sir or Madam,\n\nI am writing to",
    "A prime number is",
    "The river rose in the night, and by morning",
    "Q: What is the boiling point of water?\nA:",
    "My favourite season is autumn because",
    "SELECT name, count(*) FROM",
    "The train left the station at",
    "Gravity is a force that",
    "Here are five tips for learning a language:\n1.",
    "The old clockmaker opened the door and",
    "In economics, supply and demand",
    "Les oiseaux chantent dans",
]
