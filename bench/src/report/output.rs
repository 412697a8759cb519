//! Where a report goes.

use std::path::PathBuf;

use super::Report;
use anyhow::{Context as _, bail};

/// Where a report goes.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Output {
    /// Write the report as JSON to this file; `-` prints it instead of the table.
    #[arg(long, value_name = "FILE|-", help_heading = "Report")]
    pub(crate) json: Option<PathBuf>,
}

impl Output {
    /// # Errors
    /// The file cannot be written, or no request was answered.
    pub(crate) fn write(&self, report: &Report) -> anyhow::Result<()> {
        self.print(report)?;
        if report.errors == report.requests {
            bail!("no request was answered: {}", report.error_samples.join("; "));
        }
        Ok(())
    }

    fn print(&self, report: &Report) -> anyhow::Result<()> {
        match &self.json {
            Some(file) if file.as_os_str() == "-" => {
                crate::print_json(&serde_json::to_value(report)?);
            }
            Some(file) => {
                let text = format!("{:#}\n", serde_json::to_value(report)?);
                std::fs::write(file, text).with_context(|| file.display().to_string())?;
                crate::print(report);
            }
            None => crate::print(report),
        }
        Ok(())
    }
}
