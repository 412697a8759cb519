//! What comes from the environment: secrets, and what a service manager says. Nothing but configuration reads it.

/// The value of a variable; none where it is empty.
#[must_use]
pub fn one(name: &str) -> Option<String> {
    let value = std::env::var_os(name)?;
    let value = value.to_string_lossy(); // what is no text is refused where it is checked
    (!value.is_empty()).then(|| value.into_owned())
}

/// Values with commas between them.
#[must_use]
pub fn several(name: &str) -> Vec<String> {
    one(name).map_or_else(Vec::new, |value| value.split(',').map(str::to_owned).collect())
}
