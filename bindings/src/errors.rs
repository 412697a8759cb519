//! Errors of the router crate as the exceptions of `headrace.errors`.

use headrace_router::core::frame::PROTOCOL;
use headrace_router::fleet::codec::CodecError;
use pyo3::import_exception;
use pyo3::prelude::*;
use pythonize::Depythonizer;
use serde::de::DeserializeOwned;

import_exception!(headrace.errors, ConfigError);
import_exception!(headrace.errors, EtcdCompacted);
import_exception!(headrace.errors, EtcdFailed);
import_exception!(headrace.errors, FrameTooLong);
import_exception!(headrace.errors, FrameTruncated);
import_exception!(headrace.errors, MalformedFrame);
import_exception!(headrace.errors, OtherProtocol);
import_exception!(headrace.errors, StartError);
import_exception!(headrace.errors, TrailingBytes);
import_exception!(headrace.errors, UnknownFrameType);
import_exception!(headrace.errors, WireError);

pub(crate) fn codec(error: CodecError) -> PyErr {
    match error {
        CodecError::TooLong { got, limit } => FrameTooLong::new_err((got, limit)),
        CodecError::Truncated { at } => FrameTruncated::new_err((at,)),
        CodecError::UnknownType { number } => UnknownFrameType::new_err((number,)),
        CodecError::Malformed { at, expected, got } => MalformedFrame::new_err((at, expected, got)),
        CodecError::OtherVersion { got } => OtherProtocol::new_err((got, PROTOCOL)),
        CodecError::TrailingBytes { frame, extra } => TrailingBytes::new_err((frame, extra)),
    }
}

/// `object` as a `T`; otherwise what is wrong, with the place in front, such as `port: ...`.
pub(crate) fn depythonize<T: DeserializeOwned>(object: &Bound<'_, PyAny>) -> Result<T, String> {
    serde_path_to_error::deserialize(&mut Depythonizer::from_object(object)).map_err(|error| {
        match error.path().to_string().as_str() {
            "." => error.inner().to_string(),
            path => format!("{path}: {}", error.inner()),
        }
    })
}
