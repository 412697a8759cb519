//! What all requests share.
