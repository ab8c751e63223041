//! The registry of image and chart, and a registry on this machine for trials.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use super::answer;
use crate::dist::sums;
use crate::home::Home;

/// The name and the password at a trial's registry, and the password as the registry keeps it.
const TRIAL: (&str, &str, &str) = (
    "trial",
    "trial",
    "$2b$04$SOyVT3x0y/wu/0wK9XVRQOB/3md0G6yA747KHv.uLIRR0x4NgHn1i",
);

const USER: &str = "KPX_REGISTRY_USER";
const PASSWORD: &str = "KPX_REGISTRY_PASSWORD";

/// A registry on 127.0.0.1 that ends with this value. It has two ports: one to push with a login,
/// one to pull without.
pub(super) struct Local {
    servers: Vec<Child>,
    pub(super) port: u16,
    public_port: u16,
    folder: TempDir,
}

impl Local {
    pub(super) fn start() -> Result<Self> {
        let mut local = Self {
            servers: Vec::new(),
            port: free_port()?,
            public_port: free_port()?,
            folder: tempfile::tempdir()?,
        };
        let users = local.folder.path().join("users");
        fs::write(&users, format!("{}:{}\n", TRIAL.0, TRIAL.2))?;
        let login = format!(
            "auth: {{ htpasswd: {{ realm: trial, path: {} }} }}",
            users.display()
        );
        local.serve(local.port, false, &login)?;
        local.serve(local.public_port, true, "")?;
        Ok(local)
    }

    /// Starts a server of the registry's files, with more lines of configuration.
    fn serve(&mut self, port: u16, readonly: bool, more: &str) -> Result<()> {
        let file = |name: &str| self.folder.path().join(format!("{port}.{name}"));
        let (config, log) = (file("yml"), file("log"));
        let text = format!(
            "version: 0.1\nlog: {{ level: warn }}\nhttp: {{ addr: '127.0.0.1:{port}' }}\nstorage:\n  filesystem: {{ rootdirectory: {data} }}\n  \
             maintenance: {{ readonly: {{ enabled: {readonly} }} }}\n{more}\n",
            data = self.folder.path().join("data").display(),
        );
        fs::write(&config, text)?;
        let output = fs::File::create(&log)?;
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(&config);
        command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        let mut server = command.spawn().context("run docker-registry")?;
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut ended = false;
        while !ended && std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            std::thread::sleep(Duration::from_millis(50));
            ended = server.try_wait()?.is_some() || Instant::now() > deadline;
        }
        self.servers.push(server);
        ensure!(
            !ended,
            "the registry does not answer: {}",
            fs::read_to_string(&log)?
        );
        Ok(())
    }

    /// Returns the name of an image or a chart as somebody without a login pulls it.
    pub(super) fn public(&self, name: &str) -> String {
        let [from, to] = [self.port, self.public_port].map(|port| format!(":{port}/"));
        name.replacen(&from, &to, 1)
    }
}

/// Returns a port that was free: nobody else takes it so soon.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

impl Drop for Local {
    fn drop(&mut self) {
        for server in &mut self.servers {
            let _ended = server.kill();
            let _ended = server.wait();
        }
    }
}

/// A login at the registry, in a file that skopeo, Helm and cosign read and that ends with this
/// value.
pub(super) struct Login {
    /// `None` without name and password: the tools have logins of their own.
    folder: Option<TempDir>,
}

impl Login {
    /// Logs in with the name and the password of the environment, or at a trial's registry.
    pub(super) fn new(home: &Home, trial: bool) -> Result<Self> {
        let of = |name: &str| std::env::var(name).ok();
        let named = if trial {
            Some((TRIAL.0.to_owned(), TRIAL.1.to_owned()))
        } else {
            whole(of(USER), of(PASSWORD))?
        };
        let Some((user, password)) = named else {
            return Ok(Self { folder: None });
        };
        let login = Self {
            folder: Some(tempfile::tempdir()?),
        };
        for host in hosts(home) {
            login.enter(host, &user, &password, trial)?;
        }
        Ok(login)
    }

    /// Returns the absence of a login: the tools' own logins are hidden from them.
    pub(super) fn nobody() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("config.json"), "{}")?;
        Ok(Self {
            folder: Some(folder),
        })
    }

    fn enter(&self, host: &str, user: &str, password: &str, trial: bool) -> Result<()> {
        let mut skopeo = Command::new("skopeo");
        skopeo.args(["login", "--username", user, "--password-stdin"]);
        skopeo.arg(format!("--tls-verify={}", !trial)).arg(host);
        self.apply(&mut skopeo);
        let mut child = skopeo
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .context("run skopeo")?;
        let mut stdin = child.stdin.take().context("the input of skopeo")?;
        stdin.write_all(password.as_bytes())?;
        drop(stdin);
        ensure!(child.wait()?.success(), "log in at {host} as {user}");
        Ok(())
    }

    pub(super) fn apply(&self, command: &mut Command) {
        if let Some(folder) = &self.folder {
            let file = folder.path().join("config.json");
            command
                .env("REGISTRY_AUTH_FILE", &file)
                .env("HELM_REGISTRY_CONFIG", &file)
                .env("DOCKER_CONFIG", folder.path());
        }
    }
}

/// Returns true if a registry answered that it has no such name or tag. Every other failure leaves
/// that open.
fn is_absent(reported: &str) -> bool {
    ["manifest unknown", "name unknown", "NAME_UNKNOWN"]
        .iter()
        .any(|answer| reported.contains(answer))
}

/// Returns name and password; `None` without both.
fn whole(user: Option<String>, password: Option<String>) -> Result<Option<(String, String)>> {
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    match (given(user), given(password)) {
        (Some(user), Some(password)) => Ok(Some((user, password))),
        (None, None) => Ok(None),
        _ => bail!("{USER} and {PASSWORD} are a login only together"),
    }
}

/// Returns the registries of image and chart, each once.
fn hosts(home: &Home) -> BTreeSet<&str> {
    [&home.image, &home.chart]
        .into_iter()
        .filter_map(|name| name.split('/').next())
        .collect()
}

/// The ways to push and pull.
pub(super) struct Access<'a> {
    /// The registry has no TLS.
    plain: bool,
    helm: &'a Path,
    login: &'a Login,
}

impl<'a> Access<'a> {
    pub(super) fn new(plain: bool, helm: &'a Path, login: &'a Login) -> Self {
        Self { plain, helm, login }
    }

    /// Returns the digest of the image, or of the index, in an archive.
    pub(super) fn digest_of_file(&self, archive: &Path) -> Result<String> {
        let mut inspect = Command::new("skopeo");
        inspect.args(["inspect", "--raw"]);
        inspect.arg(format!("oci-archive:{}", archive.display()));
        let manifest = answer(inspect)?;
        Ok(format!("sha256:{}", sums::sha256(manifest.as_bytes())))
    }

    /// Returns the default values of a packed chart.
    pub(super) fn values_of(&self, chart: &Path) -> Result<String> {
        let mut helm = Command::new(self.helm);
        helm.args(["show", "values"]).arg(chart);
        answer(helm)
    }

    /// Pushes an image, or an index with its images, under a name with its tag. Returns the digest
    /// in the registry.
    pub(super) fn push_image(&self, archive: &Path, tag: &str) -> Result<String> {
        let mut copy = Command::new("skopeo");
        copy.args(["copy", "--quiet", "--all", "--preserve-digests"]);
        copy.arg(format!("--dest-tls-verify={}", !self.plain));
        copy.arg(format!("oci-archive:{}", archive.display()))
            .arg(format!("docker://{tag}"));
        self.login.apply(&mut copy);
        answer(copy)?;
        self.digest(tag)?.context("the registry lost the image")
    }

    /// Pulls all that belongs to an image, by a name with its digest.
    pub(super) fn pull_image(&self, reference: &str, to: &Path) -> Result<()> {
        let mut copy = Command::new("skopeo");
        copy.args(["copy", "--quiet", "--all", "--preserve-digests"]);
        copy.arg(format!("--src-tls-verify={}", !self.plain));
        copy.arg(format!("docker://{reference}"))
            .arg(format!("dir:{}", to.display()));
        self.login.apply(&mut copy);
        answer(copy).map(drop)
    }

    /// Returns the digest that a registry has under a name with a tag; `None` if it has none.
    pub(super) fn digest(&self, name: &str) -> Result<Option<String>> {
        let mut inspect = Command::new("skopeo");
        inspect.args(["inspect", "--raw"]);
        inspect.arg(format!("--tls-verify={}", !self.plain));
        inspect.arg(format!("docker://{name}"));
        self.login.apply(&mut inspect);
        let output = inspect.output().context("run skopeo")?;
        if output.status.success() {
            return Ok(Some(format!("sha256:{}", sums::sha256(&output.stdout))));
        }
        let reported = String::from_utf8_lossy(&output.stderr);
        ensure!(is_absent(&reported), "look for {name}: {reported}");
        Ok(None)
    }

    /// Pushes a chart into a folder of the registry. Returns its digest there.
    pub(super) fn push_chart(&self, chart: &Path, folder: &str) -> Result<String> {
        let mut helm = self.helm("push");
        helm.arg(chart).arg(format!("oci://{folder}"));
        let output = helm.output().context("run helm")?;
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        let digest = said
            .lines()
            .find_map(|line| line.strip_prefix("Digest: "))
            .with_context(|| format!("push the chart: {said}"))?;
        Ok(digest.trim().to_owned())
    }

    /// Returns the content of a pulled chart.
    pub(super) fn pull_chart(&self, folder: &str, version: &str) -> Result<Vec<u8>> {
        let to = tempfile::tempdir()?;
        let mut helm = self.helm("pull");
        helm.arg(format!("oci://{folder}/kpx"));
        helm.args(["--version", version])
            .arg("--destination")
            .arg(to.path());
        answer(helm)?;
        let chart = to.path().join(format!("kpx-{version}.tgz"));
        fs::read(&chart).with_context(|| format!("read {}", chart.display()))
    }

    fn helm(&self, verb: &str) -> Command {
        let mut helm = Command::new(self.helm);
        helm.arg(verb);
        helm.args(self.plain.then_some("--plain-http"));
        self.login.apply(&mut helm);
        helm
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_registrys_own_answer_counts_as_absent() {
        // As skopeo prints the answers of docker-registry: to a tag, to a name without any tag.
        for answer in [
            "Error parsing image name \"docker://r.invalid/kpx:1.2.3\": reading manifest 1.2.3 in r.invalid/kpx: manifest unknown",
            "reading manifest 1.2.3 in r.invalid/kpx: name unknown: repository name not known to registry",
        ] {
            assert!(is_absent(answer), "{answer}");
        }
        for failure in [
            "pinging container registry r.invalid: Get \"https://r.invalid/v2/\": dial tcp: lookup r.invalid: no such host",
            "reading manifest 1.2.3 in r.invalid/kpx: unauthorized: authentication required",
        ] {
            assert!(!is_absent(failure), "{failure}");
        }
    }

    #[test]
    fn half_a_login_is_refused() {
        let of = |text: &str| Some(text.to_owned());
        assert_eq!(whole(None, of("")).unwrap(), None);
        assert_eq!(
            whole(of("me"), of("secret")).unwrap(),
            Some(("me".to_owned(), "secret".to_owned()))
        );
        for (user, password) in [(of("me"), None), (of("me"), of("")), (None, of("secret"))] {
            let error = whole(user, password).unwrap_err().to_string();
            assert!(error.contains(USER) && error.contains(PASSWORD), "{error}");
        }
    }

    #[test]
    fn image_and_chart_may_have_different_registries() {
        let home = |image: &str, chart: &str| Home {
            image: image.to_owned(),
            chart: chart.to_owned(),
            ..Home::default()
        };
        let different = home("a.invalid/kpx", "b.invalid:5000/charts");
        assert_eq!(
            Vec::from_iter(hosts(&different)),
            ["a.invalid", "b.invalid:5000"]
        );
        let same = home("a.invalid/kpx", "a.invalid/charts");
        assert_eq!(Vec::from_iter(hosts(&same)), ["a.invalid"]);
    }
}
