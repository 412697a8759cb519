//! Prometheus' text format.

use std::fmt::{Display, Write as _};

/// Text in the format of Prometheus, one family after the other.
#[derive(Debug, Default)]
pub struct Text(String, &'static str);

impl Text {
    /// Begins a family: samples follow.
    pub fn family(&mut self, name: &'static str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        self.1 = name;
    }

    /// One sample of the family begun last.
    pub fn sample(&mut self, suffix: &str, labels: &[(&str, &dyn Display)], value: impl Display) {
        self.0.push_str(self.1);
        self.0.push_str(suffix);
        for (i, (label, value)) in labels.iter().enumerate() {
            let value = value.to_string();
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{}{label}=\"{value}\"", if i == 0 { '{' } else { ',' });
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    /// What was written.
    #[must_use]
    pub fn into_string(self) -> String {
        self.0
    }

    /// A family of one number.
    pub fn single(&mut self, name: &'static str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.sample("", &[], value);
    }
}
