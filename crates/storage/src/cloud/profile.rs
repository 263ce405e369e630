//! Where S3 and its credentials are, when the environment does not say: the profile files of AWS's own programs,
//! `~/.aws/credentials` and `~/.aws/config` (or `AWS_SHARED_CREDENTIALS_FILE` and `AWS_CONFIG_FILE`), and in them the
//! profile `AWS_PROFILE`, or `default`. What the environment says comes first.
//!
//! Keys in files are read again every few seconds, so that a mount outlives credentials that expire.

use std::collections::HashMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use object_store::aws::{AmazonS3Builder, AwsCredential};
use object_store::{CredentialProvider, Error};

/// Bytes of a profile file.
const MAX_FILE: u64 = 1 << 20;

/// How long keys from a file are used before the file is looked at again.
const FRESH: Duration = Duration::from_secs(2);

/// S3 as the environment and the profile files describe it.
///
/// # Errors
/// The profile that `AWS_PROFILE` names is in none of the files.
pub(super) fn of_environment() -> Result<AmazonS3Builder, String> {
    let mut builder = AmazonS3Builder::from_env();
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let files = Files::of_environment();
    let profile = files.read();
    if profile.is_none() && is_set("AWS_PROFILE") {
        return Err(format!(
            "there is no profile {} (AWS_PROFILE) in {} or {}",
            files.profile,
            files.credentials.display(),
            files.config.display()
        ));
    }
    let profile = profile.unwrap_or_default();
    if !is_set("AWS_REGION")
        && !is_set("AWS_DEFAULT_REGION")
        && let Some(region) = profile.get("region")
    {
        builder = builder.with_region(region);
    }
    if !is_set("AWS_ENDPOINT")
        && !is_set("AWS_ENDPOINT_URL")
        && let Some(endpoint) = profile.get("endpoint_url")
    {
        builder = builder.with_endpoint(endpoint);
    }
    if !is_set("AWS_ACCESS_KEY_ID") && keys(&profile).is_some() {
        builder = builder.with_credentials(Arc::new(FromFiles {
            files,
            known: Mutex::new(None),
        }));
    }
    Ok(builder)
}

type Profile = HashMap<String, String>;

#[derive(Debug)]
struct Files {
    credentials: PathBuf,
    config: PathBuf,
    profile: String,
}

impl Files {
    fn of_environment() -> Files {
        let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".aws");
        let file = |variable: &str, name: &str| {
            std::env::var_os(variable).map_or_else(|| home().join(name), PathBuf::from)
        };
        let profile = std::env::var("AWS_PROFILE").unwrap_or_default();
        Files {
            credentials: file("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            config: file("AWS_CONFIG_FILE", "config"),
            profile: match profile.as_str() {
                "" => "default".into(),
                _ => profile,
            },
        }
    }

    /// The profile; of what both files say, the first one counts. None if it is in neither.
    fn read(&self) -> Option<Profile> {
        let text = |path: &PathBuf| match path.metadata() {
            Ok(metadata) if metadata.len() <= MAX_FILE => std::fs::read_to_string(path).ok(),
            _ => None,
        };
        let named = format!("profile {}", self.profile);
        let of = |path, sections: &[&str]| text(path).and_then(|text| section(&text, sections));
        let config = of(&self.config, &[&named, &self.profile]);
        let credentials = of(&self.credentials, &[&self.profile]);
        match (config, credentials) {
            (None, None) => None,
            (config, credentials) => {
                let mut profile = config.unwrap_or_default();
                profile.extend(credentials.unwrap_or_default());
                Some(profile)
            }
        }
    }
}

/// The settings in a section of an INI file; none if there is no such section.
fn section(text: &str, names: &[&str]) -> Option<Profile> {
    let mut found: Option<Profile> = None;
    let mut is_in = false;
    for line in text.lines() {
        let whole = line.trim_end();
        let line = whole.trim_start();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            is_in = names.contains(&name.trim());
            if is_in {
                found.get_or_insert_default();
            }
            continue;
        }
        // What is indented belongs to the setting before it, and none of those counts here.
        if let (true, false, Some((key, value))) =
            (is_in, whole.starts_with([' ', '\t']), line.split_once('='))
        {
            let settings = found.get_or_insert_default();
            settings.insert(key.trim().to_lowercase(), value.trim().to_owned());
        }
    }
    found
}

fn keys(profile: &Profile) -> Option<AwsCredential> {
    Some(AwsCredential {
        key_id: profile.get("aws_access_key_id")?.clone(),
        secret_key: profile.get("aws_secret_access_key")?.clone(),
        token: profile.get("aws_session_token").cloned(),
    })
}

/// Keys that are read from the files, again and again.
#[derive(Debug)]
struct FromFiles {
    files: Files,
    known: Mutex<Option<(Instant, Arc<AwsCredential>)>>,
}

impl FromFiles {
    fn keys(&self) -> Result<Arc<AwsCredential>, Error> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, keys)) = &*known
            && at.elapsed() < FRESH
        {
            return Ok(Arc::clone(keys));
        }
        let read = self.files.read().as_ref().and_then(keys);
        let read = read.map(Arc::new).ok_or_else(|| Error::Unauthenticated {
            path: String::new(),
            source: format!(
                "the profile {} in {} has no keys any more",
                self.files.profile,
                self.files.credentials.display()
            )
            .into(),
        })?;
        *known = Some((Instant::now(), Arc::clone(&read)));
        Ok(read)
    }
}

type Asked<'a> = Pin<Box<dyn Future<Output = Result<Arc<AwsCredential>, Error>> + Send + 'a>>;

impl CredentialProvider for FromFiles {
    type Credential = AwsCredential;

    // As the macro of the trait writes it.
    fn get_credential<'life0, 'async_trait>(&'life0 self) -> Asked<'async_trait>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(std::future::ready(self.keys()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_read_from_both_files() {
        let dir = tempfile::tempdir().unwrap();
        let files = |profile: &str| Files {
            credentials: dir.path().join("credentials"),
            config: dir.path().join("config"),
            profile: profile.into(),
        };
        assert_eq!(files("default").read(), None);
        std::fs::write(
            dir.path().join("config"),
            "[default]\nregion = eu-west-3\n; a remark\n[profile work]\nendpoint_url=http://lyon:9000\ns3 =\n  endpoint_url = http://inner\nregion=r\n",
        )
        .unwrap();
        std::fs::write(
            dir.path().join("credentials"),
            "# none\n[work]\naws_access_key_id = A\r\nAWS_SECRET_ACCESS_KEY=b=c\naws_session_token =t\nregion = other\n[empty]\n",
        )
        .unwrap();
        let work = files("work").read().unwrap();
        assert_eq!(work["endpoint_url"], "http://lyon:9000");
        assert_eq!(work["region"], "other");
        let read = keys(&work).unwrap();
        assert_eq!(
            (
                read.key_id.as_str(),
                read.secret_key.as_str(),
                read.token.as_deref()
            ),
            ("A", "b=c", Some("t"))
        );
        let default = files("default").read().unwrap();
        assert_eq!(default["region"], "eu-west-3");
        assert!(keys(&default).is_none());
        assert_eq!(files("empty").read(), Some(Profile::new()));
        assert_eq!(files("none").read(), None);
    }
}
