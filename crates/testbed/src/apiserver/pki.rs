//! Certificates, the token, and the files that give them to clients.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use rand::RngExt;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};
use rustls::pki_types::PrivateKeyDer;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use serde_json::{Value, json};

/// The server's own CA, and the certificates that it issued.
#[derive(Debug)]
pub(crate) struct Pki {
    pub(crate) token: String,
    /// In PEM.
    pub(crate) ca: String,
    issuer: Issuer<'static, KeyPair>,
    pub(crate) server: Arc<ServerConfig>,
    /// The configuration of [`Self::server`] with an expired certificate.
    pub(crate) expired: Arc<ServerConfig>,
}

/// The credentials in a kubeconfig.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Login {
    Token,
    ClientCertificate,
    /// With a certificate that expires after this time.
    ShortClientCertificate(Duration),
}

impl Pki {
    /// Creates all keys and certificates; `sans` are the server's names and addresses.
    pub(crate) fn new(sans: Vec<String>) -> Result<Self> {
        let mut ca = named("kpx-test-ca")?;
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_key = KeyPair::generate().context("make a key")?;
        let ca_certificate = ca
            .self_signed(&ca_key)
            .context("sign the authority's certificate")?;
        let issuer = Issuer::new(ca, ca_key);

        let mut server = CertificateParams::new(sans).context("read the API server's names")?;
        server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let mut roots = RootCertStore::empty();
        roots
            .add(ca_certificate.der().clone())
            .context("trust the authority")?;
        let roots = Arc::new(roots);
        let mut expired = server.clone();
        expired.not_after = date_time_ymd(2020, 1, 1);
        Ok(Self {
            token: format!("{:032x}", rand::rng().random::<u128>()),
            ca: ca_certificate.pem(),
            server: serve_by(&server, &issuer, &roots)?,
            expired: serve_by(&expired, &issuer, &roots)?,
            issuer,
        })
    }

    pub(crate) fn write_kubeconfig(&self, path: &Path, url: &str, login: Login) -> Result<()> {
        let user = match login {
            Login::Token => json!({"token": self.token}),
            Login::ClientCertificate => self.client(None)?,
            Login::ShortClientCertificate(life) => self.client(Some(life))?,
        };
        let cluster = json!({"server": url, "certificate-authority-data": BASE64.encode(&self.ca)});
        let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}], "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}]});
        let text = serde_saphyr::to_string(&config).context("write a kubeconfig")?;
        fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }

    fn client(&self, life: Option<Duration>) -> Result<Value> {
        let mut client = named("kpx-test-client")?;
        client.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if let Some(life) = life {
            client.not_after = (SystemTime::now() + life).into();
        }
        let key = KeyPair::generate().context("make a key")?;
        let client = client
            .signed_by(&key, &self.issuer)
            .context("sign the client's certificate")?;
        Ok(
            json!({"client-certificate-data": BASE64.encode(client.pem()),
            "client-key-data": BASE64.encode(key.serialize_pem())}),
        )
    }

    /// Writes the files of /var/run/secrets/kubernetes.io/serviceaccount.
    pub(crate) fn write_service_account(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
        for (name, text) in [
            ("ca.crt", self.ca.as_str()),
            ("token", &self.token),
            ("namespace", "kube-system"),
        ] {
            let path = folder.join(name);
            fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(())
    }
}

/// Returns a configuration with a certificate of these parameters that accepts clients of these
/// roots.
fn serve_by(
    parameters: &CertificateParams,
    issuer: &Issuer<'_, KeyPair>,
    roots: &Arc<RootCertStore>,
) -> Result<Arc<ServerConfig>> {
    let key = KeyPair::generate().context("make a key")?;
    let certificate = parameters
        .signed_by(&key, issuer)
        .context("sign the API server's certificate")?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
        .allow_unauthenticated()
        .build()
        .context("verify clients")?;
    let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(anyhow::Error::msg)?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .context("choose TLS versions")?
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![certificate.der().clone()], key)
        .context("use the API server's certificate")?;
    // A resumed session presents no certificate again, so an expired certificate would pass. (Go's
    // servers check.)
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn named(name: &str) -> Result<CertificateParams> {
    let mut params = CertificateParams::new(Vec::new()).context("make a certificate")?;
    params.distinguished_name.push(DnType::CommonName, name);
    Ok(params)
}
