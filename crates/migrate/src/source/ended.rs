//! How a move has ended, for a person.

use super::Driver;
use crate::error::MigrateError;
use crate::seeder::End;

impl Driver<'_> {
    /// What becomes of the command.
    pub(super) fn ended(&mut self, end: End) -> Result<(), MigrateError> {
        match end {
            End::Moved if self.given_up.is_some() => Err(MigrateError::GivenUp {
                machine: self.options.name_there.to_string(),
                peer: self.options.send.peer_name.clone(),
                why: self.given_up.take().unwrap_or_default(),
            }),
            End::Moved => match (self.trouble.take(), self.lost_leases.take()) {
                (None, None) => Ok(()),
                (None, Some(why)) => Err(MigrateError::LeaseLost {
                    machine: self.options.name_there.to_string(),
                    peer: self.options.send.peer_name.clone(),
                    why,
                }),
                (Some(why), _) if self.device.is_some() => Err(MigrateError::Unsupported(format!(
                    "{} is at {} now, but cannot be used there yet: {why}",
                    self.options.name_there, self.options.send.peer_name
                ))),
                (Some(why), _) => Err(MigrateError::NotStarted {
                    machine: self.options.name_there.to_string(),
                    peer: self.options.send.peer_name.clone(),
                    why,
                }),
            },
            End::Stayed(mut why) => {
                if why.is_empty() {
                    why = format!("{} had refused it", self.options.send.peer_name);
                }
                if let Some(trouble) = self.trouble.take() {
                    why = format!("{why}; {trouble}");
                }
                why += &self.leaving.found(&self.options.send.peer_name);
                Err(MigrateError::Stayed {
                    machine: self.options.machine.to_string(),
                    why,
                    code: self.refused,
                })
            }
            End::Unknown => Err(self.disagree()),
        }
    }

    /// What a person is told when only they can find out where it runs.
    fn disagree(&self) -> MigrateError {
        let (peer, machine) = (&self.options.send.peer_name, &self.options.machine);
        let way = match self.device {
            Some(_) => format!("drover mounts break {machine}"),
            None if self.seeder.record().is_committed() => {
                format!("drover migrate --break {machine}")
            }
            None => format!("drover migrate --abort {machine}"),
        };
        MigrateError::Unsupported(format!(
            "{peer} and this site do not agree about where {machine} runs: look at both; if {peer} does not have it, `{way}`"
        ))
    }
}
