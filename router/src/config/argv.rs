//! Flags that put secrets on the command line, which every user of a machine can read: refused, with what to use instead.

use std::convert::Infallible;
use std::ffi::OsStr;

use clap::builder::TypedValueParser;
use clap::error::ErrorKind;
use clap::{Arg, Command, Error};

const KEY: Refused = Refused("--api-key", "--api-key-file FILE or the variable HEADRACE_API_KEY");
const SECRET: Refused = Refused("--secret", "--secret-file FILE or the variable HEADRACE_SECRET");

/// For commands that take a key of a client.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct NoKey {
    #[arg(long, hide = true, value_parser = KEY)]
    api_key: Option<Infallible>,
}

/// For commands that take the secret of the workers.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct NoSecret {
    #[arg(long, hide = true, value_parser = SECRET)]
    secret: Option<Infallible>,
}

/// Takes no value; its error names what to use instead, and does not repeat the value.
#[derive(Debug, Clone, Copy)]
struct Refused(&'static str, &'static str);

impl TypedValueParser for Refused {
    type Value = Infallible;

    fn parse_ref(
        &self,
        command: &Command,
        _: Option<&Arg>,
        _: &OsStr,
    ) -> Result<Infallible, Error> {
        let Self(flag, instead) = self;
        let text = format!(
            "{flag} is not taken: every user of this machine can read command lines; use {instead}\n"
        );
        Err(Error::raw(ErrorKind::UnknownArgument, text).with_cmd(command))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        _key: NoKey,
        #[command(flatten)]
        _secret: NoSecret,
    }

    #[test]
    fn a_key_on_the_command_line_is_refused_and_not_repeated() {
        for (flag, instead) in [
            (&["--api-key", "sesame"][..], "--api-key-file"),
            (&["--api-key=sesame"], "HEADRACE_API_KEY"),
            (&["--secret", "sesame"], "--secret-file"),
            (&["--secret=sesame"], "HEADRACE_SECRET"),
        ] {
            let error = Cli::try_parse_from([&["headrace"][..], flag].concat()).unwrap_err();
            let text = error.to_string();
            assert!(
                text.contains(instead) && text.contains(flag[0].split('=').next().unwrap()),
                "{text}"
            );
            assert!(!text.contains("sesame") && error.use_stderr(), "{text}");
        }
        let help = Cli::try_parse_from(["headrace", "--help"]).unwrap_err().to_string();
        assert!(!help.contains("--secret") && !help.contains("--api-key"), "{help}");
    }
}
