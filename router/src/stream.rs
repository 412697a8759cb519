//! Tokens of one request on their way from the link to the client.
