//! One member of an etcd: its connection and the login there.

use std::path::Path;
use std::time::Duration;

use axum::http::uri::PathAndQuery;
use futures_util::{Stream, stream};
use prost::Message;
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Streaming};
use tonic_prost::ProstCodec;

use super::CALL;
use super::error::{MemberRefused, chain};
use super::messages::{LoggedIn, Login};
use crate::config::{EtcdAccess, EtcdTls};

/// A watch that nobody answers is given up after both. etcd hangs up on who pings more often than every 5 s.
const PING: Duration = Duration::from_secs(10);
const PONG: Duration = Duration::from_secs(5);
/// Longest answer; a prefix of routers has some kilobytes.
const ANSWER_BYTES: usize = 4 << 20;

/// One member. It is dialled when it is asked, and stays connected.
#[derive(Debug)]
pub(super) struct Member {
    endpoint: String,
    access: EtcdAccess,
    channel: Option<Channel>,
    /// The channel has given an answer.
    answered: bool,
    token: Option<Token>,
}

/// What a login gave. Its value is marked as sensitive, so that no `Debug` shows it.
type Token = MetadataValue<Ascii>;

impl Member {
    pub(super) fn new(endpoint: String, access: EtcdAccess) -> Self {
        Self { endpoint, access, channel: None, answered: false, token: None }
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Hangs up; the next call dials and logs in again.
    pub(super) fn forget(&mut self) {
        self.channel = None;
        self.answered = false;
        self.token = None;
    }

    /// Opens a call and waits for its first answer. A login that etcd has forgotten is made once more.
    pub(super) async fn open<Q, A, S>(
        &mut self,
        path: &'static str,
        questions: impl Fn() -> S,
    ) -> Result<(A, Streaming<A>), MemberRefused>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
        S: Stream<Item = Q> + Send + 'static,
    {
        let channel = self.channel().await?;
        let anonymous = self.access.tls.as_ref().is_some_and(|tls| tls.identity.is_none());
        let answer = self.call(channel, path, questions).await;
        let first = !self.answered;
        self.answered |= answer.is_ok();
        answer.map_err(
            |refused| {
                if anonymous && first { refused.without_certificate() } else { refused }
            },
        )
    }

    /// A call, with the login before it where there is one.
    async fn call<Q, A, S>(
        &mut self,
        channel: Channel,
        path: &'static str,
        questions: impl Fn() -> S,
    ) -> Result<(A, Streaming<A>), MemberRefused>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
        S: Stream<Item = Q> + Send + 'static,
    {
        let had_token = self.token.is_some();
        let token = self.token(&channel).await?;
        match call(channel.clone(), path, questions(), token).await {
            Err(refused) if refused.is_token() && had_token => {
                self.token = None;
                let token = self.token(&channel).await?;
                call(channel, path, questions(), token).await
            }
            other => other,
        }
    }

    async fn channel(&mut self) -> Result<Channel, MemberRefused> {
        if let Some(channel) = &self.channel {
            return Ok(channel.clone());
        }
        let scheme = if self.access.tls.is_some() { "https" } else { "http" };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{}", self.endpoint))
            .map_err(MemberRefused::connecting)?
            .connect_timeout(CALL)
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(PONG);
        if let Some(tls) = &self.access.tls {
            let refused = |error| MemberRefused::tls(chain(&error), error);
            endpoint = endpoint.tls_config(tls_config(tls)?).map_err(refused)?;
        }
        let channel = endpoint.connect().await.map_err(MemberRefused::connecting)?;
        Ok(self.channel.insert(channel).clone())
    }

    /// What further calls show; nothing where there is no login, here or there.
    async fn token(&mut self, channel: &Channel) -> Result<Option<Token>, MemberRefused> {
        let Some(login) = &self.access.login else { return Ok(None) };
        if self.token.is_none() {
            let login = Login { name: login.user.clone(), password: login.password.0.clone() };
            let question = stream::iter([login]);
            let path = "/etcdserverpb.Auth/Authenticate";
            let LoggedIn { token } = match call(channel.clone(), path, question, None).await {
                Ok((logged_in, _)) => logged_in,
                // as etcd's own clients do it: a fleet may be told of a user before etcd asks for one
                Err(refused) if refused.is_without_logins() => return Ok(None),
                Err(refused) => return Err(refused),
            };
            let mut token = Token::try_from(token)
                .map_err(|_| MemberRefused::answer("a token that no header takes"))?;
            token.set_sensitive(true);
            self.token = Some(token);
        }
        Ok(self.token.clone())
    }
}

async fn call<Q, A>(
    channel: Channel,
    path: &'static str,
    questions: impl Stream<Item = Q> + Send + 'static,
    token: Option<Token>,
) -> Result<(A, Streaming<A>), MemberRefused>
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    let mut request = Request::new(questions);
    if let Some(token) = token {
        request.metadata_mut().insert("token", token);
    }
    // a member that is cut off from the others ends its watches, rather than to be silent
    request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
    let mut grpc = Grpc::new(channel).max_decoding_message_size(ANSWER_BYTES);
    grpc.ready().await.map_err(MemberRefused::broken)?;
    let codec = ProstCodec::<Q, A>::default();
    let answers = grpc.streaming(request, PathAndQuery::from_static(path), codec).await?;
    let mut answers = answers.into_inner();
    match answers.message().await? {
        Some(first) => Ok((first, answers)),
        None => Err(MemberRefused::answer("no message in the answer")),
    }
}

/// Certificates are read anew for each connection, so that they may be replaced while the process runs.
fn tls_config(tls: &EtcdTls) -> Result<ClientTlsConfig, MemberRefused> {
    let read = |path: &Path| {
        std::fs::read(path).map_err(|error| {
            MemberRefused::tls(format!("cannot read {}: {error}", path.display()), error)
        })
    };
    let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(&tls.ca)?));
    if let Some(own) = &tls.identity {
        config = config.identity(Identity::from_pem(read(&own.cert)?, read(&own.key)?));
    }
    Ok(config)
}
