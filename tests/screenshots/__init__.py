"""A fleet under load as a person sees it, for the documents."""
