//! fake_worker
