//! Errors of the command line itself.

use std::process::ExitCode;

use clap::CommandFactory;
use clap::error::{ContextValue, ErrorKind};
use drover_agent::error::{Error, Kind, chain, one_line};
use drover_net::{Code, NetError};
use drover_teleport::TeleportError;

use crate::cli::Cli;
use crate::out;

/// A usage error: exit code 2.
pub fn usage(message: impl Into<String>) -> anyhow::Error {
    Error::usage(message).into()
}

/// Prints what clap has to say: help, or a usage error without its usage line, which names the options that were given.
pub fn of_arguments(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        error.exit();
    }
    match error.kind() {
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            out::note(&Cli::command().render_help().to_string())
        }
        _ => out::note(&shown(error)),
    }
    ExitCode::from(Kind::Usage as u8)
}

/// A usage error without its usage line, and without what URLs in it name: secrets have any characters.
fn shown(error: &clap::Error) -> String {
    let mut text = error.to_string();
    let given = error.context().flat_map(|(_, value)| match value {
        ContextValue::String(value) => vec![value.as_str()],
        ContextValue::Strings(values) => values.iter().map(String::as_str).collect(),
        _ => Vec::new(),
    });
    for value in given {
        if let Some((scheme, rest)) = value.split_once("://")
            && !rest.is_empty()
        {
            text = text.replace(value, &format!("{scheme}://..."));
        }
    }
    let parts = text.trim_end().split("\n\n");
    let parts: Vec<&str> = parts.filter(|part| !part.starts_with("Usage:")).collect();
    without_passwords(&parts.join("\n\n"))
}

/// A text without the passwords of URLs in it: what is not accepted as an argument is repeated, and may be logged.
fn without_passwords(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        let end = after.find(|c: char| c.is_whitespace() || "/'\"".contains(c));
        let (authority, after) = after.split_at(end.unwrap_or(after.len()));
        let secret = authority.rsplit_once('@').and_then(|(user, host)| {
            let (user, _) = user.split_once(':')?;
            Some(format!("{user}:***@{host}"))
        });
        shown.push_str(before);
        shown.push_str("://");
        shown.push_str(secret.as_deref().unwrap_or(authority));
        rest = after;
    }
    shown + rest
}

/// A refusal, or something that does not exist: exit code 3.
pub fn refused(message: impl Into<String>) -> anyhow::Error {
    Error::refused(message).into()
}

/// Adds the option that helps to an error with this code.
pub fn hint(e: Error, code: Code, hint: &str) -> anyhow::Error {
    match e.code() == Some(code) {
        true => Error::of_kind(e.kind(), format!("{}; {hint}", one_line(&e))).into(),
        false => e.into(),
    }
}

/// The error on one line. For a peer that cannot be reached it ends with the way out.
pub fn line(error: &(dyn std::error::Error + 'static)) -> String {
    let line = one_line(error);
    let is_away = |e: &NetError| matches!(e, NetError::Unreachable { .. });
    let mut away = chain(error).filter_map(|e| match (e.downcast_ref(), e.downcast_ref()) {
        (Some(Error::Net(e)), _) | (_, Some(TeleportError::Net(e))) => Some(e),
        _ => None,
    });
    match away.any(is_away) {
        true => format!("{line}: check that `drover serve` is running there, and the firewall"),
        false => line,
    }
}

/// This site has no image of that name.
pub fn no_image(name: &drover_core::ImageName) -> anyhow::Error {
    Error::no_image(None, name).into()
}

/// A failure to send to `peer`.
pub fn of_sending(error: TeleportError, peer: &str) -> anyhow::Error {
    match &error {
        TeleportError::Refused(refusal) if refusal.code == Code::Untrusted => {
            Error::of_peer(peer, refusal).into()
        }
        _ => of_opening(error),
    }
}

/// A failure to open an image. If the file could be sent without interpreting its format, the message ends with that hint.
pub fn of_opening(error: impl Into<TeleportError>) -> anyhow::Error {
    let error = error.into();
    match &error {
        TeleportError::Image(image) if image.opaque_helps() => {
            let line = one_line(&error);
            Error::msg(format!("{line}; --opaque sends the file as it is")).into()
        }
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_that_is_refused_is_not_repeated() {
        use clap::Parser;
        for url in [
            "redis://:pa/ss@h/0",
            "redis://h/3?password=pa/ss",
            "s3://AKIA:pa/ss@bucket/x",
            "s3://AKIA:pa' /ss@bucket/x",
        ] {
            for words in [
                &["mount", url, "/mnt"][..],
                &["mounts", "break", url],
                &["mounts", url],
            ] {
                let Err(error) = Cli::try_parse_from([&["drover"], words].concat()) else {
                    panic!("{words:?} is accepted");
                };
                let shown = shown(&error);
                assert!(!shown.contains("pa") || !shown.contains("ss@"), "{shown}");
                assert!(!shown.contains("pa/ss"), "{shown}");
            }
        }
    }

    #[test]
    fn passwords_in_urls_are_not_repeated() {
        for (text, shown) in [
            ("no 'redis://:a@b/3' here", "no 'redis://:***@b/3' here"),
            (
                "redis://me:a@:b@c:7/3?x=://d:e@f",
                "redis://me:***@c:7/3?x=://d:***@f",
            ),
            ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
            ("nbd://me@host/x", "nbd://me@host/x"),
            ("", ""),
        ] {
            assert_eq!(without_passwords(text), shown);
        }
    }
}
