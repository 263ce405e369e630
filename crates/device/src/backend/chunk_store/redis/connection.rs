//! A connection to a Redis server.

use std::borrow::Cow;
use std::io::{self, BufReader, Write};

use super::reply::{self, Reply};
use crate::backend::chunk_store::address::RedisServer;
use crate::backend::chunk_store::socket::{self, Stream};

/// Arguments of a command, the first being its name.
pub type Command<'a> = Vec<Cow<'a, [u8]>>;

/// A command of text.
pub fn command(words: &[&str]) -> Command<'static> {
    let words = words
        .iter()
        .map(|word| Cow::Owned(word.as_bytes().to_vec()));
    words.collect()
}

/// A connection; after an error it is of no use.
pub struct Connection(BufReader<Stream>);

impl Connection {
    /// Connects, and says who this is.
    ///
    /// # Errors
    /// Those of the connection; `PermissionDenied` with what the server says.
    pub fn open(server: &RedisServer) -> io::Result<Connection> {
        let stream = Stream::open(&server.host, server.port, server.tls)?;
        let mut connection = Connection(BufReader::with_capacity(64 << 10, stream));
        let mut greeting = Vec::new();
        match (password(server)?, &server.user) {
            (Some(password), Some(user)) => greeting.push(command(&["AUTH", user, &password])),
            (Some(password), None) => greeting.push(command(&["AUTH", &password])),
            (None, Some(user)) => {
                return Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    format!("there is no password for the user {user}"),
                ));
            }
            (None, None) => {}
        }
        if server.database > 0 {
            greeting.push(command(&["SELECT", &server.database.to_string()]));
        }
        for reply in connection.call(&greeting, 64)? {
            if let Reply::Error(why) = reply {
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
            }
        }
        Ok(connection)
    }

    /// Sends commands together; their replies, in order, have values of at most `most` bytes.
    ///
    /// # Errors
    /// Those of the connection; any of the commands may have been done.
    pub fn call(&mut self, commands: &[Command<'_>], most: usize) -> io::Result<Vec<Reply>> {
        let mut bytes = Vec::new();
        for command in commands {
            write!(bytes, "*{}\r\n", command.len())?;
            for word in command {
                write!(bytes, "${}\r\n", word.len())?;
                bytes.extend_from_slice(word);
                bytes.extend_from_slice(b"\r\n");
            }
        }
        let stream = self.0.get_mut();
        stream.write_all(&bytes)?;
        stream.flush()?;
        drop(bytes);
        let replies = commands.iter().map(|_| reply::read(&mut self.0, most));
        replies.collect()
    }
}

/// The password, from its file or from where `redis-cli` looks for it.
fn password(server: &RedisServer) -> io::Result<Option<String>> {
    let Some(path) = &server.password_file else {
        let password = std::env::var("REDISCLI_AUTH").ok();
        return Ok(password.filter(|password| !password.is_empty()));
    };
    let text = socket::small_file(path)?;
    Ok(Some(text.lines().next().unwrap_or_default().to_owned()))
}
