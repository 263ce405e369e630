//! The moves to this site whose rest was given up since their source was lost: one that comes back is told so, for good.
//!
//! In `machines/.NAME.broken` (`docs/format/machine.md`), beside the record of the machine. It is written before the record that ends
//! the move, and counts when that does not say any more that the machine is here in part.

use std::path::PathBuf;

use drover_core::ImageName;
use drover_net::{Code, Refusal, decode, encode};
use drover_storage::Envelope;
use drover_store::machine::{Machines, Token};

const FORMAT: Envelope = Envelope {
    magic: *b"DRVRBRKN",
    version: 1,
    max_bytes: 4096,
};

/// Upper bound on the moves of a machine of which that is remembered: the last ones.
const MAX_GIVEN_UP: usize = 64;

/// Those of one machine.
pub(super) struct GivenUp {
    machine: ImageName,
    path: PathBuf,
}

impl GivenUp {
    pub fn of(machines: &Machines, machine: &ImageName) -> Self {
        Self {
            path: machines.directory().join(format!(".{machine}.broken")),
            machine: machine.clone(),
        }
    }

    /// Whether the rest of a move was given up.
    ///
    /// # Errors
    /// [`Code::Io`], [`Code::Corrupt`]: then nobody knows.
    pub fn has(&self, token: Token) -> Result<bool, Refusal> {
        Ok(self.read()?.contains(&token))
    }

    /// Remembers one, durably.
    ///
    /// # Errors
    /// As of [`GivenUp::has`]; when it cannot be written: then it is as it was.
    pub fn add(&self, token: Token) -> Result<(), Refusal> {
        let mut known = self.read()?;
        if known.contains(&token) {
            return Ok(());
        }
        let too_many = (known.len() + 1).saturating_sub(MAX_GIVEN_UP);
        known.drain(..too_many);
        known.push(token);
        self.write(&known)
    }

    /// Forgets one, which goes on.
    ///
    /// # Errors
    /// As of [`GivenUp::add`].
    pub fn remove(&self, token: Token) -> Result<(), Refusal> {
        let mut known = self.read()?;
        if !known.contains(&token) {
            return Ok(());
        }
        known.retain(|known| *known != token);
        self.write(&known)
    }

    fn read(&self) -> Result<Vec<Token>, Refusal> {
        let read = FORMAT.read(&self.path);
        let Some(bytes) = read.map_err(|e| self.wrong(Code::Io, &e))? else {
            return Ok(Vec::new());
        };
        let body = FORMAT.open(&bytes);
        let body = body.map_err(|e| self.wrong(Code::Corrupt, &e))?;
        decode(body).map_err(|e| self.wrong(Code::Corrupt, &e))
    }

    fn write(&self, known: &[Token]) -> Result<(), Refusal> {
        let written = FORMAT.write(&self.path, &encode(&known));
        written.map_err(|e| self.wrong(Code::Io, &e))
    }

    fn wrong(&self, code: Code, why: &dyn std::fmt::Display) -> Refusal {
        let text = format!(
            "which moves of {} were broken ({}): {why}",
            self.machine,
            self.path.display()
        );
        Refusal::new(code, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_moves_that_were_given_up_are_remembered() {
        let directory = tempfile::tempdir().unwrap();
        let machines = Machines::new(directory.path().to_owned());
        let of = |name: &str| GivenUp::of(&machines, &ImageName::new(name).unwrap());
        let web = of("web");
        let token = |n: usize| Token([n as u8; 16]);
        assert!(!web.has(token(0)).unwrap());
        web.remove(token(0)).unwrap();
        for n in 0..=MAX_GIVEN_UP {
            web.add(token(n)).unwrap();
            web.add(token(n)).unwrap();
        }
        assert!(!web.has(token(0)).unwrap());
        assert!((1..=MAX_GIVEN_UP).all(|n| web.has(token(n)).unwrap()));
        web.remove(token(5)).unwrap();
        assert!(!web.has(token(5)).unwrap() && web.has(token(6)).unwrap());
        assert!(!of("db").has(token(6)).unwrap());
        assert!(machines.names().unwrap().is_empty());
        // Nobody knows; it is not taken for none.
        std::fs::write(directory.path().join(".web.broken"), "torn").unwrap();
        let wrong = [
            web.has(token(6)).map(drop),
            web.add(token(6)),
            web.remove(token(6)),
        ];
        for wrong in wrong {
            let wrong = wrong.unwrap_err();
            assert_eq!(wrong.code, Code::Corrupt);
            assert!(wrong.to_string().contains(".web.broken"), "{wrong}");
        }
    }
}
